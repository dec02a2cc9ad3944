"""What the block drafters share: configuration, backbone, drafter with loop stages, packed training stages."""
