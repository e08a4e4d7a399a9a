"""Runs in the environment of the previous release: replays a log of commands by its state machine.

Standard input: msgpack `[[index, envelope], …]`. Standard output: msgpack `[[[metadata version, value, name of the
error or nil], …], state]`.
"""

from __future__ import annotations

import importlib
import sys

import msgspec


def main() -> None:
    commands, machine = importlib.import_module("controller.commands"), importlib.import_module("controller.state")
    state = machine.ControllerState()
    results = []
    for index, blob in msgspec.msgpack.decode(sys.stdin.buffer.read(), type=list[tuple[int, bytes]]):
        applied = state.apply(commands.decode_envelope(blob), index)
        result = commands.decode_result(applied.result)
        results.append([result.version, bytes(result.value), result.error.name if result.error else None])
    sys.stdout.buffer.write(msgspec.msgpack.encode([results, state.dump()]))


if __name__ == "__main__":
    main()
