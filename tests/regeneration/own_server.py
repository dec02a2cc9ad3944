"""A server as a program of its own, in place of SGLang: ready after a moment, with a helper process like SGLang's.

python -m tests.regeneration.own_server MODEL PORT NOTES [--revision R] [--fail | --hang]
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from dloop.results.atomic import write_json
from tests.regeneration.stub_server import StubServer

SECONDS_UNTIL_READY = 0.3


def main() -> None:
    model, port, notes, *more = sys.argv[1:]
    if "--fail" in more:
        sys.exit("no such device")
    helper = subprocess.Popen(["sleep", "600"])
    facts = {"model": model, "gpu": os.environ["CUDA_VISIBLE_DEVICES"], "more": more, "pids": [os.getpid(), helper.pid]}
    write_json(Path(notes, f"gpu_{facts['gpu']}.json"), facts)
    if "--hang" in more:
        time.sleep(600)
    time.sleep(SECONDS_UNTIL_READY)
    with StubServer(port=int(port)):
        time.sleep(600)


if __name__ == "__main__":
    main()
