"""transformers' own DFlash generation as an independent oracle: same ids, same acceptance lengths.

Its draft class is the DFlash network under other tensor names (transformers:models/muse_glimmer_assistant).
"""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from dloop.decoding.clock import Clock
from dloop.decoding.loop import Settings, generate
from dloop.decoding.target import Target
from dloop.hosts.registry import load_host
from dloop.hosts.target_model import load_target

CPU = torch.device("cpu")
library = pytest.importorskip("transformers.models.muse_glimmer_assistant")
RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def library_draft(folder):
    """The checkpoint in the library's class."""
    raw = json.loads((folder / "config.json").read_text())
    sizes = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "rms_norm_eps block_size vocab_size max_position_embeddings"
    )
    config = transformers.MuseGlimmerAssistantConfig(
        **{name: raw[name] for name in sizes.split()},
        **raw["dflash_config"],
        rope_parameters={"rope_type": "default", "rope_theta": raw["rope_theta"]},
        layer_types=["full_attention"] * raw["num_hidden_layers"],
    )
    model = transformers.MuseGlimmerAssistantModel(config).eval()
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({RENAMED.get(name, name): tensor for name, tensor in tensors.items()})
    return model


@pytest.mark.parametrize("prompt", [[126, 84, 63, 80, 104, 91, 141], [7, 8, 9], list(range(30, 60))], ids=len)
def test_ids_and_acceptance_equal_the_librarys_generation(golden, monkeypatch, prompt):
    target = load_target(str(golden / "dflash/target"), dtype=torch.float32, device=CPU)
    utils = transformers.generation.utils
    name = next(name for name in dir(utils) if "DFlash" in name and name.endswith("CandidateGenerator"))
    theirs = []

    class Watched(getattr(utils, name)):
        def update_candidate_strategy(self, input_ids, scores, num_matches):
            theirs.append(int(num_matches) + 1)
            return super().update_candidate_strategy(input_ids, scores, num_matches)

    monkeypatch.setattr(utils, name, Watched)
    draft = library_draft(golden / "dflash/draft")
    expected = target.generate(
        torch.tensor([prompt]),
        assistant_model=draft,
        speculation_type="dflash",
        do_sample=False,
        max_new_tokens=48,
        eos_token_id=None,
        pad_token_id=0,
    )
    host = load_host(str(golden / "dflash/draft"), dtype=torch.float32, device=CPU)
    ours = Target(target, host.taps)
    result = generate(ours, host.drafter(target), prompt, Settings(48, frozenset()), Clock(CPU))
    ours.close()
    assert prompt + result.output_ids == expected[0].tolist()
    lengths = [r.acceptance_length for r in result.rounds]
    # The library counts the prefill as a round and cuts its last round at the limit.
    assert theirs[0] == 1
    assert theirs[1:-1] == lengths[: len(theirs) - 2]
    assert sum(theirs) == 48
