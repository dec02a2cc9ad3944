"""A copy of the workflow in a temporary folder, and Snakemake to call there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


class Project:
    """The workflow's files in a folder of their own; the package stays where it is installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("Snakefile", "workflow", "config", "slurm"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)

    def configuration(self, name: str = "config.yaml") -> dict[str, Any]:
        return yaml.safe_load((self.folder / "config" / name).read_text(encoding="utf-8"))

    def write(self, values: dict[str, Any], name: str = "config.yaml") -> None:
        (self.folder / "config" / name).write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")

    def snakemake(self, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
        """Call Snakemake in the folder; its output, both streams together, is `.stdout`."""
        environment = os.environ if path is None else {**os.environ, "PATH": path}
        command = [str(Path(sys.executable).with_name("snakemake")), *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def logs(self) -> str:
        """What the jobs said, for a failed run."""
        return "\n".join(f"--- {log}\n{log.read_text()}" for log in sorted(self.folder.glob("logs/**/*.log")))

    def planned(self, *arguments: str) -> dict[str, int]:
        """Jobs by rule that a dry run lists; the targets without work of their own left out."""
        listing = self.snakemake(*arguments, "--dry-run", "--cores", "2").stdout
        if "Nothing to be done" in listing:
            return {}
        assert "Job stats:" in listing, listing
        table = listing.split("Job stats:")[1].split("total")[0]
        jobs = {name: int(count) for name, count in re.findall(r"^([a-z_]+) +(\d+)$", table, re.MULTILINE)}
        return {name: count for name, count in jobs.items() if not name.startswith("all_")}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)
