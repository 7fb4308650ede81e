import json
import logging
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from pipeline_rl_jax.data.files import expand_paths, read_problem_files
from pipeline_rl_jax.data.formats import RecordMapping

FIXTURES = Path(__file__).parent / "fixtures"
AUTO = RecordMapping(format="auto")
GOOD_LINE = json.dumps({"question": "p", "answer": "#### 1"})


def read(paths, mapping=AUTO):
    return read_problem_files("data.path", str(paths), mapping)


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_fixtures_of_every_layout():
    def answers(name, mapping=AUTO):
        return [problem.answer for problem in read(FIXTURES / name, mapping)]

    assert answers("gsm8k.jsonl") == ["72", "-5", "2,100"]
    assert answers("math.jsonl") == [r"\frac{1}{2}", "9"]
    assert answers("benchmark.jsonl") == ["4"]
    assert answers("orz.json") == ["16", "n = 5"]
    assert answers("svamp.jsonl") == ["28", "1.5"]
    fields = {"problem_field": "task.messages.0.text", "answer_field": "gold.value"}
    assert answers("mapped.jsonl", RecordMapping(format="mapped", **fields)) == ["16"]


def test_parquet_of_nested_records(tmp_path):
    rows = [
        {
            "prompt": [{"content": f"What is {n}?", "role": "user"}],
            "reward_model": {"ground_truth": str(n), "style": "rule"},
        }
        for n in range(3)
    ]
    path = tmp_path / "own.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    problems = read(path)
    assert [(p.problem, p.answer, p.task) for p in problems[:2]] == [
        ("What is 0?", "0", "own"),
        ("What is 1?", "1", "own"),
    ]


def test_lists_and_globs_keep_their_order_and_name_each_file_once(tmp_path):
    a, b = write(tmp_path / "a.jsonl", GOOD_LINE), write(tmp_path / "b.jsonl", GOOD_LINE)
    assert expand_paths("data.path", f"{b}, {tmp_path}/*.jsonl,") == [b, a]


def test_files_of_several_layouts_together():
    problems = read(f"{FIXTURES}/gsm8k.jsonl,{FIXTURES}/orz.json")
    assert [problem.task for problem in problems] == ["gsm8k"] * 3 + ["orz"] * 2


@pytest.mark.parametrize("name", ["train.jsonl", "test-00000-of-00002.jsonl"])
def test_a_file_named_after_its_part_takes_the_folders_name(tmp_path, name):
    (tmp_path / "sums").mkdir()
    assert read(write(tmp_path / "sums" / name, GOOD_LINE))[0].task == "sums"


def test_json_lines_in_a_json_file_and_a_byte_order_mark(tmp_path):
    assert len(read(write(tmp_path / "a.json", f"{GOOD_LINE}\n{GOOD_LINE}\n"))) == 2
    assert len(read(write(tmp_path / "b.jsonl", "\ufeff" + GOOD_LINE))) == 1
    assert len(read(write(tmp_path / "c.json", f"\ufeff \n[{GOOD_LINE}]"))) == 1


def test_odd_line_ends_inside_a_record_do_not_break_it(tmp_path):
    line = json.dumps({"question": "a\u2028b\x85c", "answer": "#### 1"}, ensure_ascii=False)
    assert read(write(tmp_path / "a.jsonl", line + "\r\n"))[0].problem == "a\u2028b\x85c"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", GOOD_LINE + '\n\n{"question": ', r"a\.jsonl, line 3, is not JSON"),
        ("a.jsonl", GOOD_LINE.encode() + b'\n{"question": "\xff"}', "line 2, is not JSON"),
        ("a.json", f"[{GOOD_LINE}, ", r"a\.json is not JSON"),
        ("a.parquet", b"PAR1 no", r"a\.parquet is not a parquet file"),
        ("a.jsonl", "", r"data\.path \(.*a\.jsonl\) holds no problem"),
        ("a.json", "[]", "holds no problem"),
        ("a.jsonl", "\n \n", "holds no problem"),
        ("a.jsonl", '{"x": 1}', r"a\.jsonl, line 1, cannot be read: the fields 'x' fit none"),
        ("a.jsonl", "5", "line 1, cannot be read: records of kind int fit none"),
        ("a.jsonl", GOOD_LINE + "\n" + "[" * 100_000, "line 2, is not JSON"),
        ("a.json", "[" * 100_000, "is not JSON"),
        (
            "a.jsonl",
            GOOD_LINE + '\n{"question": "", "answer": "#### 1"}',
            "line 2, cannot be read as gsm8k: the problem is empty",
        ),
        (
            "a.jsonl",
            GOOD_LINE + '\n{"problem": "p", "answer": "1"}',
            "line 2, cannot be read as gsm8k: field 'answer'|lacks '####'",
        ),
    ],
)
def test_bad_content_is_named_with_its_place(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_bad_paths_are_named(tmp_path):
    (tmp_path / "folder").mkdir()
    write(tmp_path / "notes.txt", "x")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    for paths, message in [
        (tmp_path / "none.jsonl", r"data\.path \(.*none\.jsonl\) names no file"),
        (tmp_path / "*.parquet", r"\(.*\*\.parquet\) names no file"),
        (tmp_path / "folder", r"is a directory; use .*folder/\*\.jsonl"),
        (tmp_path / "loop.jsonl", r"loop\.jsonl\) is a link that leads nowhere"),
        (tmp_path / "fol*", r"also finds .*folder, which is a directory"),
        (tmp_path / "notes.txt", r"must end in \.jsonl, \.json, \.parquet"),
        (" , ", "must name a file"),
    ]:
        with pytest.raises(ValueError, match=message):
            read(paths)


def test_incomplete_records_can_be_left_out_and_are_counted(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", '{"question": "p", "answer": "####"}\n' + GOOD_LINE)
    dropping = RecordMapping(format="auto", drop_incomplete=True)
    with caplog.at_level(logging.WARNING):
        assert [problem.answer for problem in read(path, dropping)] == ["1"]
    assert "1 records without problem or answer dropped" in caplog.text
    write(path, '{"question": "p", "answer": "####"}')
    with pytest.raises(ValueError, match="holds no problem"):
        read(path, dropping)
