"""The embedded default: a corpus and a tiny target made on the spot; nothing else imports it."""
