import json
import shutil
import subprocess
import sys

import pytest

from dloop.results import checks, provenance


def test_the_environment_has_what_results_need_and_is_json(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    env = provenance.environment("cpu", "torch.bfloat16", "sdpa")
    assert set(checks.ENV_KEYS) <= env.keys()
    assert env == json.loads(json.dumps(env))
    assert (env["processes"], env["gpu_count"], env["dtype"], env["attn"]) == (3, 0, "bfloat16", "sdpa")
    assert env["gpu"].startswith("CPU: ")
    assert len(env["gpu"]) > 5


def test_the_code_hash_follows_texts_and_names(tmp_path, monkeypatch):
    package = tmp_path / "dloop"
    (package / "decoding").mkdir(parents=True)
    (package / "decoding" / "loop.py").write_text("a = 1\n")
    (package / "tables.py").write_text("b = 1\n")
    monkeypatch.setattr(provenance, "PACKAGE", package)
    loop, everything = provenance.code_hash("dloop.decoding"), provenance.code_hash()
    (package / "tables.py").write_text("b = 2\n")
    assert provenance.code_hash("dloop.decoding") == loop
    assert provenance.code_hash() != everything
    (package / "decoding" / "loop.py").rename(package / "decoding" / "circle.py")
    assert provenance.code_hash("dloop.decoding") != loop


def test_the_code_hash_does_not_depend_on_the_order_of_modules():
    assert provenance.code_hash("dloop.cli", "dloop.results") == provenance.code_hash("dloop.results", "dloop.cli")
    with pytest.raises(LookupError, match=r"no module dloop\.nowhere"):
        provenance.code_hash("dloop.nowhere")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_the_package_s_own_checkout(tmp_path, monkeypatch):
    package = tmp_path / "dloop"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(provenance, "PACKAGE", package)

    def git(*arguments):
        identity = ("-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    assert provenance.git_commit() is None
    git("add", ".")
    git("commit", "-m", "First")
    clean = provenance.git_commit()
    assert len(clean) == 40
    (package / "__init__.py").write_text("# changed\n")
    assert provenance.git_commit() == f"{clean}-dirty"


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.git_commit() is None


def test_the_command_is_what_a_person_would_type(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/dloop/benchmark.py", "--note", "two words"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", type("Spec", (), {"name": "dloop.benchmark"}))
    assert provenance.command_line() == "python -m dloop.benchmark --note 'two words'"


def test_results_import_no_torch():
    modules = ", ".join(f"dloop.results.{name}" for name in ("atomic", "metrics", "provenance", "record"))
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code])
    assert done.returncode == 0
