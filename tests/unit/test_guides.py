"""The pages for users: commands parse, code compiles, quoted messages are in the source."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from kerasps.tools.cli.main import _parser
from support.documentation import CHECKOUT, code_blocks, commands_in, page_text, run_example

PAGES = (
    "for_large_tables",
    "for_preemptible_workers",
    "for_gpu_workers",
    "tables_without_a_vocabulary",
    "sizing",
    "why_is_it_slow",
    "errors",
    "faq",
)
WITH_CODE = [*sorted((CHECKOUT / "docs").glob("*.md")), CHECKOUT / "README.md"]
PROGRAMS = {
    *("kerasps", "pip", "python", "python3", "tox", ".venv/bin/tox", "git", "docker", "kubectl"),
    *("sbatch", "until", "export", "cd", "."),
}
LONGEST_SENTENCE = 30  # words
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def without_code(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def sentences(text):
    """The sentences of a page, and the cells of its tables, as plain words."""
    text = LINK.sub(lambda link: link[0][1 : link[0].index("]")], without_code(text))
    blocks = re.split(r"\n\s*\n|^\s*(?:[-#]|\d+\.) |^\|[-| :]+\|$|\|", text, flags=re.MULTILINE)
    for block in blocks:
        yield from re.split(r"(?<=[.!?])\s+", " ".join(block.split()))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_answers_in_short_sentences(page):
    long = [text for text in sentences(page_text(page)) if len(text.split()) > LONGEST_SENTENCE]
    assert long == []


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_commands_and_code_of_a_page_are_well_formed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for script in ("train.py", "evaluate.py"):
        (tmp_path / script).touch()  # the command line asks whether it is there
    text = page.read_text("utf-8")
    for program, *words in commands_in(text):
        assert program in PROGRAMS
        if program == "kerasps":
            _parser().parse_args(words)
    for block in code_blocks(text):
        compile(block, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


# Figures


def test_the_table_of_memory_is_worked_out_right():
    rows = re.findall(
        r"^\| ([\d,]+) x (\d+) \|(.+)\|$", page_text("for_large_tables"), re.MULTILINE
    )
    assert len(rows) == 3
    for count, width, cells in rows:
        table = int(count.replace(",", "")) * int(width) * 4 / 1e9
        for slots, cell in enumerate(cells.split("|")):
            assert float(cell.split()[0]) == pytest.approx(table * (1 + slots), rel=0.02)


def test_the_limits_of_the_example_are_worked_out_as_the_page_says(capsys):
    run_example("sizing")
    outputs = code_blocks(page_text("sizing"), "")
    assert capsys.readouterr().out == outputs[-1]


def test_the_speed_of_a_dataset_is_measured_as_the_page_says(capsys):
    run_example("why_is_it_slow")
    assert re.fullmatch(r"\d+ batches/s\n", capsys.readouterr().out)


def test_a_table_without_a_vocabulary_is_in_one_process_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = code_blocks(page_text("tables_without_a_vocabulary"))
    namespace = {}
    for example in examples:
        if "ParameterServerStrategy" in example:  # `tests/processes/test_guides.py` runs it
            continue
        exec(compile(example, "docs/tables_without_a_vocabulary.md", "exec"), namespace)
    assert namespace["loaded"].get_layer("words").num_rows == 4


def test_the_bytes_of_a_row_are_added_up_right():
    text = page_text("tables_without_a_vocabulary")
    (table,) = re.findall(
        r"^\| for each row \| bytes \|\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL
    )
    found = re.findall(r"\| (\d+)(?: to (\d+))? \|$", table, re.MULTILINE)
    least = sum(int(low) for low, _ in found)
    most = sum(int(high or low) for low, high in found)
    assert f"and {least} to {most} bytes beside that" in text
    (more,) = map(int, re.findall(r"takes\s+(\d+) bytes more, so reckon with", text))
    beside = most + more
    assert f"64 + {beside}) bytes = {100e6 * (2 * 64 + beside) / 1e9:.1f} GB" in text


# Messages


@functools.cache
def texts_in(directory):
    """Each text in the code of a package but for docstrings, as the parts between its fields."""
    found = []
    for path in sorted(directory.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
        }
        parts_of_texts = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts_of_texts |= {id(part) for part in node.values}
                found.append([p.value for p in node.values if isinstance(p, ast.Constant)])
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in docstrings | parts_of_texts
            ):
                found.append([node.value])
    return found


def is_in(message, text):
    """True where the parts of a message, between its `…`, are in parts of the text, in order."""
    parts = iter(text)
    current, place = next(parts, None), 0
    for wanted in filter(None, (part.strip() for part in message.split("…"))):
        while current is not None and (start := current.find(wanted, place)) < 0:
            current, place = next(parts, None), 0
        if current is None:
            return False
        place = start + len(wanted)
    return True


def quoted(*, of_kerasps):
    """The messages that the page quotes, of kerasps or of others."""
    ours, _, theirs = page_text("errors").partition("## Of TensorFlow and Keras")
    text = (ours if of_kerasps else theirs).partition("## When the script starts")
    rows = re.findall(r"^\| (`[^|]+) \|", text[2] or text[0], re.MULTILINE)
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("message", quoted(of_kerasps=True))
def test_a_message_of_kerasps_is_in_its_source(message):
    assert any(is_in(message, text) for text in texts_in(CHECKOUT / "kerasps"))


def test_what_the_page_quotes_of_a_trace_is_what_a_trace_says():
    said = texts_in(CHECKOUT / "kerasps" / "tools" / "tracing")
    quotes = re.findall(r'"(?:Worker \d )?(waits for [a-z ]+)', page_text("why_is_it_slow"))
    assert len(quotes) >= 6
    for quote in quotes:
        assert any(is_in(quote, text) for text in said), quote


IN_PYTHON = {
    "create_per_worker_dataset": "tensorflow.python.distribute.input_lib",
    "must be used with": "tensorflow.python.distribute.parameter_server_strategy_v2",
    "There must be": "tensorflow.python.distribute.parameter_server_strategy_v2",
    "Cannot retrieve": "tensorflow.python.distribute.coordinator.coordinator_context",
}


def test_messages_of_others_are_those_that_they_say():
    messages = quoted(of_kerasps=False)
    for word, name in IN_PYTHON.items():
        source = importlib.import_module(name).__file__
        texts = [
            [node.value]
            for node in ast.walk(ast.parse(Path(source).read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        found = [message for message in messages if word in message]
        assert found
        for message in found:
            assert any(is_in(message, text) for text in texts), message
    for module, name in ((keras.utils, "experimental"), (tf, "estimator")):
        with pytest.raises(AttributeError) as caught:
            getattr(module, name)
        assert str(caught.value) in messages
