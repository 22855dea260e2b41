"""Search for the ranks' trace files by folder, prefix or name, and reading event by event.

A file is a Chrome trace with one event per line, of which one is held at a time. Where a rank was
killed, the end is missing and the last line may be incomplete.
"""

from __future__ import annotations

import gzip
import itertools
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

import msgspec

from asyncddp.errors import ArgumentError

JsonEvent: TypeAlias = dict[str, Any]
ProgressCallback: TypeAlias = Callable[[Path, int], object]
"""Called now and then with a file and the number of bytes of it that were read."""

_HINT = "ranks write them under 'asyncddp run --timeline DIR …'"
_RANK_FILE = re.compile(r"(.*?)(\d+)\.json(\.gz)?")
_TIME = re.compile(rb'"ts": ?(-?\d+(?:\.\d+)?)')
_PADDING = b"[], \t\r\n"  # of an event in its line
_CHUNK = 1 << 20  # bytes between two calls of advance
_decode = msgspec.json.Decoder(JsonEvent).decode


def no_progress(path: Path, count: int) -> None:
    """Ignore progress reports."""


@dataclass(frozen=True)
class RankTraceInfo:
    """Metadata of one rank's trace file; times are in µs on the rank's own clock."""

    path: Path
    rank: int
    size: int  # number of ranks of the run
    host: str
    started: float  # Unix time in seconds
    clocks: tuple[tuple[float, float, float], ...]  # (ts, offset, error) of each measurement
    start: float
    first: float  # time of the first event
    last: float


def find_trace_files(sources: Iterable[str | Path]) -> list[Path]:
    """Find trace files by folders (``out``), prefixes (``out/bf_``) and names, in rank order."""
    found: list[Path] = []
    for source in map(Path, sources):
        if source.is_dir():
            found += _in_folder(source)
        else:
            found += [source] if source.exists() else _with_prefix(source)
    return list(dict.fromkeys(found))


def _numbered(folder: Path) -> dict[str, list[Path]]:
    """List files named ``<prefix><number>.json`` by prefix, each list in order of number."""
    named = [(path, _RANK_FILE.fullmatch(path.name)) for path in folder.iterdir()]
    matches = [(path, match) for path, match in named if match is not None]
    found: dict[str, list[Path]] = {}
    for path, match in sorted(matches, key=lambda pair: int(pair[1][2])):
        found.setdefault(match[1], []).append(path)
    return found


def _in_folder(folder: Path) -> list[Path]:
    found = _numbered(folder)
    if "rank" in found:
        return found["rank"]
    near = min(found, default=None)
    hint = "" if near is None else f" There is {found[near][0]}: give its prefix, {folder / near}."
    raise ArgumentError(f"no rank0.json, rank1.json, … in {folder}; {_HINT}.{hint}")


def _with_prefix(prefix: Path) -> list[Path]:
    if not prefix.parent.is_dir():
        raise ArgumentError(f"no such folder: '{prefix.parent}'; timelines are files, and {_HINT}.")
    found = _numbered(prefix.parent).get(prefix.name)
    if found is None:
        raise ArgumentError(
            f"no such file or folder: '{prefix}', nor '{prefix}0.json'; timelines are files, and "
            f"{_HINT}."
        )
    return found


def _lines(path: Path, advance: ProgressCallback) -> Iterator[bytes]:
    behind = 0
    try:
        with path.open("rb") as raw:
            packed = path.suffix == ".gz"
            file = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if packed else raw
            for line in file:
                yield line
                behind += len(line)
                if behind >= _CHUNK:
                    behind = 0
                    advance(path, raw.tell())
            advance(path, raw.tell())
    except (OSError, EOFError, zlib.error) as error:
        raise ArgumentError(f"{path} cannot be read: {error}.") from error


def _parse_event(text: bytes) -> JsonEvent | None:
    """Parse an event; None if the line holds no complete event."""
    try:
        event = _decode(text)
    except ValueError:
        return None
    return event if "ph" in event else None


def read_events(path: Path, advance: ProgressCallback = no_progress) -> Iterator[JsonEvent]:
    """Yield the events of a rank's or a merged trace file; its last line may be incomplete."""
    torn = 0
    for number, line in enumerate(_lines(path, advance), 1):
        text = line.strip(_PADDING)
        if not text:
            continue
        if torn:
            raise ArgumentError(
                f"{path}, line {torn} is no trace event; expected a JSON object per line, as "
                f"{_HINT}. Only the last line may be torn."
            )
        event = _parse_event(text)
        if event is None:
            torn = number
        else:
            yield event


def is_merged(path: Path) -> bool:
    """Return True if a file was written by ``asyncddp timeline merge``."""
    begin = itertools.islice(_lines(path, no_progress), 2)
    return any(b'"asyncddp.merged"' in line for line in begin)


def scan_trace(path: Path, advance: ProgressCallback = no_progress) -> RankTraceInfo | None:
    """Read a rank's trace metadata without parsing all events; None if the file is empty."""
    identity: JsonEvent = {}
    clocks = []
    first, last, empty = float("inf"), float("-inf"), True
    for line in _lines(path, advance):
        found = _TIME.search(line)
        if b'"asyncddp.' in line:
            event = _parse_event(line.strip(_PADDING)) or {}
            name = event.get("name")
            if name == "asyncddp.merged":
                raise ArgumentError(
                    f"{path} is merged already; open it at ui.perfetto.dev, or read it with "
                    f"'asyncddp timeline report {path}'."
                )
            if name == "asyncddp.rank":
                identity = event["args"]
            elif name == "asyncddp.clock":
                clocks.append((event["ts"], event["args"]["offset"], event["args"]["error"]))
        elif found is not None:
            ts = float(found[1])
            first, last = min(first, ts), max(last, ts)
        empty = empty and not line.strip(_PADDING)
    if empty:
        return None
    _check_identity(path, identity)
    start = min((first, *(ts for ts, _, _ in clocks)))
    start = start if start < float("inf") else 0.0
    first, last = max(start, first) if last >= first else start, max(start, last)
    host, started = identity.get("host", ""), identity.get("started_unix", 0.0)
    who = path, identity["rank"], identity["size"], host, started
    return RankTraceInfo(*who, tuple(sorted(clocks)), start, first, last)


def _check_identity(path: Path, identity: JsonEvent) -> None:
    """Reject traces of other programs and of newer format versions."""
    if not {"rank", "size"} <= identity.keys():
        raise ArgumentError(
            f"{path} is not a rank's timeline: it has no event 'asyncddp.rank'. Give files that "
            f"asyncddp wrote; {_HINT}."
        )
    if identity.get("version", 1) != 1:
        raise ArgumentError(
            f"{path} has version {identity['version']} of the format, and this asyncddp reads "
            "version 1; merge it with the asyncddp that wrote it."
        )
