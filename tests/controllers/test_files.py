"""Data files give the values that their writers wrote, in every format, and every broken file is an error with its row."""

import csv
import gzip
import json

import numpy
import pandas
import pyarrow
import pytest
from datasets import Dataset, Features, Image, Json, List, Value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from configs import CONFIGS
from controllers.environments import EnvironmentConfig, build_environment
from controllers.environments.files import read_dataset, read_file
from controllers.observe.run_folder import RunFolder


def rows_of(path) -> list[dict]:
    return [row for _, row in read_file(str(path))]


def write(path, text: str):
    path.write_bytes(text.encode())
    return path


def test_values_of_a_csv_file_are_text(tmp_path):
    text = 'prompt,answer\n1+2=,3\n5/2=,2.5\n4+6=,10\nagent,007\nbool,true\nempty,\nna,NA\ndate,2024-01-05\n"a ""b"",\nc","x\ny"\n'
    assert [row["answer"] for row in rows_of(write(tmp_path / "a.csv", text))] == (
        ["3", "2.5", "10", "007", "true", "", "NA", "2024-01-05", "x\ny"]
    )
    assert rows_of(tmp_path / "a.csv")[-1]["prompt"] == 'a "b",\nc'


def test_the_right_completion_of_a_csv_answer_is_paid(tmp_path):
    path = write(tmp_path / "a.csv", "prompt,answer\n1+2=,3\n5/2=,2.5\n4+6=,10\n")
    environment = build_environment(EnvironmentConfig(task=str(path), num_held_out=1))
    problems = [environment.problem(0), environment.problem(1), *environment.held_out()]
    assert {problem.answer: environment.reward(problem, problem.answer) for problem in problems} == (
        {"3": 1.0, "2.5": 1.0, "10": 1.0}
    )


def test_newlines_in_the_values_of_a_large_csv_file_cut_no_row(tmp_path):
    expected = [{"prompt": f"{n}\n" + "x" * 200, "answer": str(n)} for n in range(20_000)]  # about 4 MB
    path = tmp_path / "large.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "answer"])
        writer.writeheader()
        writer.writerows(expected)
    assert rows_of(path) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", 'prompt,answer\n1,2\n3,"4\n', r"a.csv:3 cannot be read; it may be cut off"),
        (
            "a.csv",
            "prompt,answer\n1,2\n3\n",
            r"a.csv:3 cannot be read; it may be cut off: 1 values for the 2 columns prompt, answer",
        ),
        ("a.csv", "prompt,answer,answer\n1,2,3\n", r"a.csv:1 names a column twice"),
        ("a.jsonl", '{"a": 1}\n{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", r"a.jsonl:2 is nested too deeply"),
        ("a.jsonl", '{"a": 1}\n{"a": ' + "9" * 5000 + "}", r"a.jsonl:2 is not JSON .*4300 digits"),
        ("a.json", '[{"a": 1}, {"a": ' + "9" * 5000 + "}]", r"a.json is not JSON .*4300 digits"),
        ("a.jsonl", '{"a": 1}\n{"a": "\\ud83d"}', r"a.jsonl:2: column 'a' holds a lone surrogate"),
        ("a.json", '[{"a": [{"b": "\\udc00"}]}]', r"a.json\[0\]: column 'a' holds a lone surrogate"),
        ("a.jsonl.gz", "no gzip", r"a.jsonl.gz cannot be read: Not a gzipped file"),
    ],
)
def test_a_broken_file_is_an_error_that_names_the_row(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        rows_of(write(tmp_path / name, text))


@pytest.mark.parametrize("name", ["a.JSONL", "a.ndjson", "a.jsonl.gz", "a.csv.gz", "a.TSV", "a.tsv.GZ", "a.json.gz"])
def test_other_endings_of_the_same_formats_are_read(tmp_path, name):
    rows, lower = [{"prompt": "a\tb", "answer": "1"}, {"prompt": "c", "answer": "2"}], name.lower()
    if ".json" in lower or ".ndjson" in lower:
        text = json.dumps(rows) if ".json" in lower.removesuffix(".gz")[-5:] else "\n".join(map(json.dumps, rows))
    else:
        between = "," if "csv" in lower else "\t"
        text = "\n".join([between.join(rows[0])] + [between.join(f'"{v}"' for v in row.values()) for row in rows])
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if lower.endswith(".gz") else data)
    assert rows_of(tmp_path / name) == rows
    assert EnvironmentConfig(task=name).is_file


def test_a_file_of_an_unknown_format_is_refused_with_the_known_ones(tmp_path):
    path = write(tmp_path / "rows.xlsx", "x")
    with pytest.raises(ValueError, match=r"rows.xlsx' is a file of an unknown format; the formats are .jsonl, .ndjson"):
        build_environment(EnvironmentConfig(task=str(path)))


def test_numbers_of_a_parquet_file_are_shown_as_they_were_written(tmp_path):
    path = tmp_path / "a.parquet"
    columns = {"prompt": ["a", "b"], "answer": pyarrow.array([0.1, 2.5], pyarrow.float32())}
    parquet.write_table(pyarrow.table(columns), path)
    assert [row["answer"] for row in rows_of(path)] == [0.1, 2.5]
    pandas.DataFrame({"prompt": ["a", "b", "c"], "answer": [3, 10, None]}).to_parquet(path)
    assert [row["answer"] for row in rows_of(path)] == [3, 10, None]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_an_answer_that_is_no_finite_number_is_refused(tmp_path, number):
    path = write(tmp_path / "a.jsonl", '{"prompt": "1", "answer": 1.0}\n' + f'{{"prompt": "2", "answer": {number}}}')
    with pytest.raises(ValueError, match=r"a.jsonl:2: column 'answer' holds '(nan|inf)'"):
        build_environment(EnvironmentConfig(task=str(path), num_held_out=1))


def test_a_directory_of_csv_files_is_read_as_text(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "train.csv", "prompt,answer\n1,007\n2,2.5\n3,NA\n4,10\n")
    environment = build_environment(EnvironmentConfig(task=str(folder), num_held_out=1))
    problems = [*environment.held_out(), *map(environment.problem, range(3))]
    assert {problem.prompt: problem.answer for problem in problems} == {"1": "007", "2": "2.5", "3": "NA", "4": "10"}


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
@pytest.mark.parametrize("options", [{}, {"keep_in_memory": True}, {"num_proc": 1}, {"streaming": True}])
@pytest.mark.parametrize(("split", "count"), [("train", 3), ("train[:2]", 2), ("train+train", 6)])
def test_a_directory_takes_the_splits_and_options_of_load_dataset(tmp_path, ending, options, split, count):
    if "streaming" in options and split != "train":
        return  # load_dataset itself refuses slices of a stream
    folder = tmp_path / "data"
    folder.mkdir()
    rows = {"csv": "prompt,answer\n1,007\n2,08\n3,9\n", "jsonl": '{"prompt": "1", "answer": "007"}\n' * 3}
    write(folder / f"train.{ending}", rows[ending])
    found = [row for _, row in read_dataset(str(folder), split, options)]
    assert len(found) == count and found[0] == {"prompt": "1", "answer": "007"}


def test_the_name_of_a_split_may_have_dots(tmp_path):
    write(tmp_path / "rows.csv", "prompt,answer\n1,007\n")
    options = {"data_files": {"tr.x": "rows.csv"}}
    for split in ("tr.x", "tr.x[:1]"):
        assert [row for _, row in read_dataset(str(tmp_path), split, options)] == [{"prompt": "1", "answer": "007"}]


def test_objects_of_a_data_set_have_their_own_fields_and_nothing_else(tmp_path):
    """Arrow gives all objects of a column the same fields, and `datasets` keeps irregular ones as texts of JSON."""
    call = {"name": "weather", "arguments": {"at": "Rome"}}
    rows = [
        {"messages": [{"role": "user", "content": "hi"}], "meta": {"x": None, "score": 0.1}},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}], "meta": {"y": [1]}},
    ]
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "train.jsonl", "\n".join(map(json.dumps, rows)))
    found = [row for _, row in read_dataset(str(folder), "train", {})]
    assert [row["messages"] for row in found] == [row["messages"] for row in rows]
    assert found[1]["meta"] == {"y": [1]}


def test_null_in_an_object_of_a_data_set_stays_if_the_data_set_holds_the_object_as_json(tmp_path):
    rows = [{"x": {"a": None, "b": [1, None]}}, {"x": [{"c": None}]}]  # Arrow has no type for both
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "train.jsonl", "\n".join(map(json.dumps, rows)))
    assert [row for _, row in read_dataset(str(folder), "train", {})] == rows


def test_media_of_a_data_set_are_not_decoded(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    broken = {"bytes": b"no image", "path": None}
    features = Features({"prompt": Value("string"), "image": Image(), "all": List(Image())})
    data = Dataset.from_dict({"prompt": ["a", "b"], "image": [broken] * 2, "all": [[broken]] * 2}, features=features)
    data.to_parquet(folder / "train.parquet")
    assert [row for _, row in read_dataset(str(folder), "train", {})] == [{"prompt": "a"}, {"prompt": "b"}]


def test_a_data_set_that_cannot_be_decoded_is_named(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    features = Features({"prompt": Value("string"), "x": Json()})
    table = pyarrow.table({"prompt": ["a"], "x": ["{no json"]}).cast(features.arrow_schema)
    parquet.write_table(table, folder / "train.parquet")
    with pytest.raises(ValueError, match=r"task='.*data', split='train' cannot be decoded: "):
        list(read_dataset(str(folder), "train", {}))


def test_small_floats_inside_lists_and_objects_are_shown_as_they_were_written(tmp_path):
    kind = pyarrow.struct({"a": pyarrow.list_(pyarrow.float32()), "b": pyarrow.float16()})
    table = pyarrow.table({"x": pyarrow.array([{"a": [0.1], "b": numpy.float16(0.1)}], kind)})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == [{"x": {"a": [0.1], "b": 0.1}}]


@pytest.mark.parametrize("damage", [b"\x00" * 40, b"\xff" * 40])
def test_a_damaged_gz_file_is_named(tmp_path, damage):
    whole = gzip.compress(b'{"prompt": "1", "answer": "2"}\n' * 999)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:20] + damage + whole[60:])
    with pytest.raises(ValueError, match=r"a.jsonl.gz cannot be read"):
        rows_of(tmp_path / "a.jsonl.gz")


# Text of a file has no lone surrogates, and csv cannot tell "\r" from "\n" outside of quotes; its writer quotes both.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
WRITTEN = st.sampled_from(
    ["007", "1.50", "true", "NA", "null", "nan", "2024-01-05", "1e5", '"', 'a"b', "a,b", "a\nb", "a\r\nb", "\t", ""]
)
TABLES = st.lists(st.tuples(st.one_of(TEXT, WRITTEN), st.one_of(TEXT, WRITTEN)), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TABLES)
def test_a_table_of_text_gives_the_same_rows_in_every_format(tmp_path, table):
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in table]
    for name, between in (("a.csv", ","), ("a.tsv", "\t")):
        with (tmp_path / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter=between)
            writer.writerow(["prompt", "answer"])
            writer.writerows(table)
    for ascii_only in (True, False):
        (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows), "utf-8")
        (tmp_path / "a.json").write_text(json.dumps(rows, ensure_ascii=ascii_only), "utf-8")
        assert rows_of(tmp_path / "a.jsonl") == rows_of(tmp_path / "a.json") == rows
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.csv") == rows_of(tmp_path / "a.tsv") == rows_of(tmp_path / "a.parquet") == rows


@pytest.mark.parametrize("loop", ["grpo", "sft", "dpo"])
def test_a_run_whose_data_has_changed_is_not_resumed(tmp_path, loop):
    train, hard = tmp_path / "train.csv", tmp_path / "hard.jsonl"
    write(train, "prompt,answer\n1,2\n")
    write(hard, '{"prompt": "1", "answer": "2"}\n')
    config = next(iter(CONFIGS[f"controllers.{loop}"].values()))()
    config.environment = EnvironmentConfig(mixture=[{"task": str(train)}, {"task": "count_bits"}])
    config.evaluation = {"hard": EnvironmentConfig(task=str(hard))}
    folder = RunFolder(tmp_path)
    config.validate_resumed(folder)  # a folder of a version that wrote no digests
    folder.data.write_text(json.dumps(config.data_digests()))
    config.validate_resumed(folder)
    for changed in (train, hard):
        before = changed.read_text()
        write(changed, before + before.splitlines()[-1] + "\n")
        with pytest.raises(ValueError, match=f"{changed.name} has changed since this run began"):
            config.validate_resumed(folder)
        write(changed, before)
    config.validate_resumed(folder)
