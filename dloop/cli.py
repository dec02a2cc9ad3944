"""Command lines: typed options in, one clear sentence out when something is wrong.

Every stage describes its options as a frozen dataclass; `parse` turns the command line into one and `run` turns a
`UserError` into a message on stderr with exit code 2. Imports nothing heavy: `--help` must answer at once.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from textwrap import dedent
from typing import Annotated, TypeVar

import tyro

OptionsT = TypeVar("OptionsT")


class UserError(Exception):
    """Bad input: what was found, the rule it broke, the fix. Shown without a traceback."""


def _parse_ints(texts: list[str]) -> tuple[int, ...]:
    return tuple(int(part) for part in texts[0].split(","))


CommaInts = Annotated[
    tuple[int, ...],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT,INT,...",
        instance_from_str=_parse_ints,
        is_instance=lambda value: isinstance(value, tuple) and all(isinstance(part, int) for part in value),
        str_from_instance=lambda value: [",".join(map(str, value))],
    ),
]
"""A list of integers in the spelling `7,14,21`."""


def parse(options: type[OptionsT], arguments: Sequence[str] | None = None) -> OptionsT:
    """The command line (or `arguments`) as an instance of the dataclass `options`; exits with 2 on a usage error."""
    return tyro.cli(options, prog=_program(), args=arguments, description=_description(options))


def _program() -> str | None:
    """What a person types to run this, where it is a module: Python itself would show the file's path."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else None


def _description(options: type) -> str:
    """What the options do, and the commands that their module shows as examples."""
    module = sys.modules[options.__module__].__doc__ or ""
    commands = [dedent(block) for block in re.findall(r"(?m)(?:^    .*\n?)+", module)]
    examples = "\n".join(block.strip("\n") for block in commands if "python -m" in block or "torchrun" in block)
    # The help joins lines that no empty line parts.
    examples = re.sub(r"\n(?=(?:[A-Z_]+=\S* )*(?:python|torchrun))", "\n\n", examples)
    return f"{options.__doc__}\n\nExamples:\n\n{examples}" if examples else str(options.__doc__)


def run(main: Callable[[], None]) -> None:
    """Call `main`; a `UserError`, or a file that cannot be used, ends the process with a message and exit code 2."""
    # Before torch is imported: its idle threads would spin, and on a busy machine keep the cores from those at work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}; give a path that can be used", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
