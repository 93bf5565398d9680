"""Reads the rows of data files and of Hugging Face data sets. Columns of CSV and TSV stay text."""

import csv
import gzip
import hashlib
import inspect
import io
import json
import math
import os
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from pyarrow import ChunkedArray, DataType

Row = tuple[str, Mapping[str, object]]
"""(place, {column: value}). The place is for error texts, such as "tasks.jsonl:3"."""

TEXT_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
FORMATS = (*TEXT_FORMATS, ".parquet", *(f"{each}.gz" for each in TEXT_FORMATS))
FORMATS_TEXT = ".jsonl, .ndjson, .json, .csv, .tsv (each also with .gz) and .parquet"


def is_data_file(path: str) -> bool:
    return path.lower().endswith(FORMATS)


def read_file(path: str) -> Iterator[Row]:
    """Raises ValueError naming the file and, if known, the row."""
    ending = Path(path.lower().removesuffix(".gz")).suffix
    readers = {".json": _read_json, ".csv": _read_csv, ".tsv": _read_csv, ".parquet": _read_parquet}
    has_rows = False
    try:
        for place, row in readers.get(ending, _read_jsonl)(path):
            has_rows = True
            if not isinstance(row, dict):
                raise ValueError(f"{place} is {str(row)[:80]!r}, not an object with columns")
            _require_text(place, row)
            yield place, row
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line} is not UTF-8 text: {error}") from None
    if not has_rows:
        raise ValueError(f"{path} has no rows")


def digest(task: str) -> str:
    """A hash of a data file, or of the data files in a directory; else ""."""
    files = [Path(task)] if Path(task).is_file() else []
    if Path(task).is_dir():
        endings = (*FORMATS, ".arrow")
        files = sorted(path for path in Path(task).rglob("*") if path.is_file() and path.name.lower().endswith(endings))
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest() if files else ""


def _read_text(path: str) -> str:
    data = Path(path).read_bytes()
    if path.lower().endswith(".gz"):
        data = gzip.decompress(data)
    return data.decode("utf-8-sig")  # drops a byte order mark


def _read_jsonl(path: str) -> Iterator[tuple[str, Any]]:
    # splitlines would also split at U+2028, which a JSON string may hold
    text = _read_text(path).rstrip()
    for number, line in enumerate(text.split("\n") if text else [], 1):
        yield f"{path}:{number}", _parsed(f"{path}:{number}", line)


def _read_json(path: str) -> Iterator[tuple[str, Any]]:
    rows = _parsed(path, _read_text(path))
    if not isinstance(rows, list):
        raise ValueError(f"{path} holds {type(rows).__name__}, not a list of objects")
    for number, values in enumerate(rows):
        yield f"{path}[{number}]", values


def _parsed(place: str, text: str) -> object:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{place} is nested too deeply: {text[:80]}") from None
    except ValueError as error:  # not JSON, or an integer of thousands of digits
        raise ValueError(f"{place} is not JSON ({error}): {text[:80]}") from None


def _read_csv(path: str) -> Iterator[tuple[str, Any]]:
    delimiter = "\t" if ".tsv" in path.lower()[-7:] else ","
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(io.StringIO(_read_text(path), newline=""), delimiter=delimiter, strict=True)
    names: Sequence[str] | None = None
    while True:
        place = f"{path}:{reader.line_num + 1}"
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(f"{place} cannot be read; it may be cut off: {error}") from None
        if names is None:
            names = values
            if len(set(names)) < len(names):
                raise ValueError(f"{place} names a column twice: {names}")
        elif values:  # an empty line has no values
            if len(values) != len(names):
                raise ValueError(
                    f"{place} cannot be read; it may be cut off: "
                    f"{len(values)} values for the {len(names)} columns {', '.join(names)}"
                )
            yield place, dict(zip(names, values, strict=True))


def _read_parquet(path: str) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} cannot be read; it may be cut off: {error}") from None
    columns = {name: _column_values(table.column(name)) for name in table.column_names}
    for number, values in enumerate(zip(*columns.values(), strict=True)):
        yield f"{path}, row {number}", dict(zip(columns, values, strict=True))


def _column_values(column: "ChunkedArray") -> list[object]:
    """Short decimals of float32, integers with gaps, objects without fields of other rows."""
    from pyarrow import types

    values: list[Any] = [_as_written(value, column.type) for value in column.to_pylist()]
    if types.is_floating(column.type):
        gaps = [value is None or math.isnan(value) for value in values]
        if any(gaps) and all(gap or value.is_integer() for value, gap in zip(values, gaps, strict=True)):
            # pandas writes a column of integers with gaps as floats
            return [None if gap else int(value) for value, gap in zip(values, gaps, strict=True)]
    return values


def _as_written(value: object, kind: "DataType") -> object:
    """float32 turns 0.1 into 0.10000000149011612, and an object gets the fields of other rows."""
    from pyarrow import types

    if value is None:
        return None
    if types.is_float16(kind) or types.is_float32(kind):
        return float(str(kind.to_pandas_dtype()(value)))
    if types.is_struct(kind):
        assert isinstance(value, Mapping)
        fields = {field.name: field.type for field in kind}
        return {name: _as_written(each, fields[name]) for name, each in value.items() if each is not None}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        assert isinstance(value, list)
        return [_as_written(each, kind.value_type) for each in value]
    return value


def _require_text(place: str, row: Mapping[str, object]) -> None:
    for name, value in row.items():
        try:
            json.dumps({name: value}, ensure_ascii=False, skipkeys=True, default=str).encode()
        except RecursionError:
            raise ValueError(f"{place}: column {name!a} is nested too deeply: {str(value)[:80]!a}") from None
        except UnicodeEncodeError:
            raise ValueError(
                f"{place}: column {name!a} holds a lone surrogate, which is no text: {str(value)[:80]!a}"
            ) from None


def read_dataset(task: str, split: str, options: Mapping[str, object]) -> Iterator[Row]:
    """Without columns of media. Raises ValueError, naming the data set, if it cannot be read."""
    from datasets import load_dataset

    named = f"task={task!r}, split={split!r}"
    try:
        data = load_dataset(task, split=split, **{**_text_columns(task, split, options), **options})
    except Exception as error:  # of many classes
        remedy = "" if os.path.isdir(task) else f"; to fetch it: hf download --repo-type dataset {task}"
        reason = str(error).split("\n")[0]
        raise ValueError(f"{named}: {reason}{remedy}") from None
    rows = enumerate(_decoded(data))
    while True:
        try:
            number, row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # each format has its own errors
            raise ValueError(f"{named} cannot be decoded: {type(error).__name__}: {error}") from error
        place = f"{task}, row {number}"
        _require_text(place, row)
        yield place, row


def _decoded(data: "Dataset | IterableDataset") -> Iterator[Mapping[str, object]]:
    """The rows as `datasets` decodes them, but floats, objects and lists as in Arrow."""
    from datasets import Dataset
    from pyarrow import types

    features = data.features or {}  # a stream may not know its features
    data = data.remove_columns([name for name, feature in features.items() if _has_media(feature)])
    if not isinstance(data, Dataset):  # streaming=True
        yield from data
        return
    schema = data.features.arrow_schema
    floats = [field.name for field in schema if types.is_floating(field.type)]
    columns = data[:]
    stored = data.with_format("arrow")
    for name in floats if len(data) else ():
        columns[name] = _column_values(stored.select_columns([name])[:].column(name))
    names = data.column_names
    for values in zip(*(columns[name] for name in names), strict=True):
        yield {name: _without_none(value, features[name]) for name, value in zip(names, values, strict=True)}


def _has_media(feature: object) -> bool:
    """True for features decoded from a file's bytes, such as images, also inside others."""
    from datasets import Json

    if isinstance(feature, Mapping | list):
        return any(map(_has_media, feature.values() if isinstance(feature, Mapping) else feature))
    is_media = hasattr(feature, "decode") and not isinstance(feature, Json)
    return is_media or _has_media(getattr(feature, "feature", []))


def _without_none(value: object, feature: object) -> object:
    """Drops the nulls that Arrow adds for fields of other rows. A Json feature keeps its object."""
    from datasets import Json

    if isinstance(feature, Json):
        return value
    if isinstance(value, Mapping):
        fields = feature if isinstance(feature, Mapping) else {}
        return {name: _without_none(each, fields.get(name)) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        return [_without_none(each, inner) for each in value]
    return value


def _text_columns(task: str, split: str, options: Mapping[str, object]) -> dict[str, object]:
    """Options that keep every value of CSV files as text; {} for other data sets."""
    from datasets import Features, Value, load_dataset, load_dataset_builder
    from datasets.packaged_modules.csv.csv import CsvConfig

    only_of_load = (
        inspect.signature(load_dataset).parameters.keys() - inspect.signature(load_dataset_builder).parameters
    )
    of_builder = {name: value for name, value in options.items() if name not in only_of_load}
    if not isinstance(load_dataset_builder(task, **of_builder).config, CsvConfig):
        return {}
    whole = re.match(r"\w+(\.\w+)*", split)  # "train" of "train[:10%]"
    [first] = load_dataset(task, split=whole[0] if whole else split, streaming=True, **of_builder).take(1)
    return {"features": Features({name: Value("string") for name in first}), "keep_default_na": False}
