import json
import os
import stat
import subprocess
import sys

import pytest

from dloop.results.atomic import replacing_folder, write_bytes, write_json, write_text


def test_text_replaces_what_was_there(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    write_text(path, "first\n")
    write_text(path, "zweite ü\r\n")
    assert path.read_bytes() == "zweite ü\r\n".encode()
    assert os.listdir(path.parent) == ["file.txt"]


def test_a_new_file_may_be_read_by_whom_the_umask_allows(tmp_path):
    previous = os.umask(0o027)
    try:
        write_bytes(tmp_path / "file", b"")
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_failed_write_keeps_the_old_content_and_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "file.txt"
    write_text(path, "old")

    def full_disk(_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_json_refuses_numbers_it_cannot_hold(tmp_path):
    write_json(tmp_path / "a.json", {"ü": [1, 2.5, None]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"ü": [1, 2.5, None]}
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "b.json", float("-inf"))
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_folder_appears_with_all_its_files(tmp_path):
    target = tmp_path / "runs" / "final"
    with replacing_folder(target) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "weights").write_text("1")
        assert not target.exists()
    assert (target / "sub" / "weights").read_text() == "1"
    assert os.listdir(target.parent) == ["final"]


def test_a_folder_replaces_the_old_one_as_a_whole(tmp_path):
    for name in ("a", "b"):
        with replacing_folder(tmp_path / "final") as folder:
            (folder / name).write_text(name)
    assert os.listdir(tmp_path) == ["final"]
    assert os.listdir(tmp_path / "final") == ["b"]


def test_a_block_that_fails_leaves_the_old_folder(tmp_path):
    with replacing_folder(tmp_path / "final") as folder:
        (folder / "a").write_text("a")

    def broken_training():
        with replacing_folder(tmp_path / "final") as folder:
            (folder / "b").write_text("b")
            raise RuntimeError("training broke")

    with pytest.raises(RuntimeError, match="training broke"):
        broken_training()
    assert os.listdir(tmp_path) == ["final"]
    assert os.listdir(tmp_path / "final") == ["a"]


KILLED = """
import os, signal, sys
from dloop.results.atomic import replacing_folder
with replacing_folder(sys.argv[1]) as folder:
    (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_amid_a_folder_leaves_only_a_temporary_name(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "final")])
    assert done.returncode == -9
    assert not (tmp_path / "final").exists()
    assert all(name.startswith(".") and name.endswith(".tmp") for name in os.listdir(tmp_path))
