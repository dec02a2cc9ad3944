"""The cost table: what is timed and what the file says."""

import json

import pytest

from dloop.cost_table import main


@pytest.mark.parametrize("host", ["dflash", "eagle3"])
def test_a_table_is_written_with_every_row_count_and_both_stages(golden, tmp_path, host):
    folder = golden / host
    out = tmp_path / "costs.json"
    main(
        [
            *("--model", str(folder / "target"), "--draft-model", str(folder / "draft"), "--output", str(out)),
            *("--rows", "1,8,15", "--repeats", "3", "--context", "40"),
        ]
    )
    table = json.loads(out.read_text())
    assert list(table["verify_seconds"]) == ["1", "8", "15"]
    assert set(table["draft_stage_seconds"]) == {"first", "next"}
    times = [*table["verify_seconds"].values(), *table["draft_stage_seconds"].values()]
    assert all(seconds > 0 for seconds in times)
    assert table["env"]["dtype"] == "float32"
