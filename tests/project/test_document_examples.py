"""The code blocks of README.md and of the site's pages run as the pages show them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.document_blocks import ROOT, SHELLS, Block, BlockError, blocks, difference, is_run, run_page
from tests.support.processes.forked_server import Server

PAGES = [
    path
    for name in ["../README.md", *re.findall(r"^\s+- .*?:\s+(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)]
    if (path := (ROOT / "docs" / name).resolve()).is_file()
]
"""README.md and the pages in the site's navigation."""

NEEDS_FASHION_MNIST = re.compile(r"fashion_mnist|examples/fashion")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path) -> list[Block]:
    return [block for block in blocks(page.read_text(encoding="utf-8")) if is_run(block)]


RUNS = [
    pytest.param(page, more, id=f"{name_of(page)}{'-more' * more}", marks=[pytest.mark.more] * more)
    for page in PAGES
    for more in (False, True)
    if any(block.is_more is more for block in blocks_of(page))
]


@pytest.mark.parametrize(("page", "more"), RUNS)
def test_the_blocks_of_a_page_run(
    page: Path, more: bool, tmp_path: Path, server: Server, request: pytest.FixtureRequest
) -> None:
    if any(NEEDS_FASHION_MNIST.search(block.text) for block in blocks_of(page) if more or not block.is_more):
        request.getfixturevalue("fashion")
    is_compared = page.name == "README.md"
    run_page(page.read_text(encoding="utf-8"), tmp_path, server, dict(os.environ), more=more, compares=is_compared)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_command_of_a_page_is_left_out_by_its_language(page: Path) -> None:
    found = [f"{block.line}: {block.language}" for block in blocks(page.read_text(encoding="utf-8"))]
    assert [line for line in found if line.endswith(SHELLS)] == []


WORKING = """
# A page

```python title="parts/numbers.py"
VALUE = 3
```

```python
from parts.numbers import VALUE
assert VALUE == 3
open("written", "w").write("text")
```

```console
$ cat \\
> written
text
$ hotloop --version
```

<!-- exit: 2 -->
```console
$ true
$ hotloop no-such-command
```

<!-- no-run: takes an hour -->
```console
$ false
```

```text
$ false
```
"""


def test_files_scripts_and_commands_share_a_folder(tmp_path: Path, server: Server) -> None:
    assert run_page(WORKING, tmp_path, server, dict(os.environ), more=False) == 4


PLANTED = {
    "a script that fails": ("assert VALUE == 3", "assert VALUE == 4"),
    "a file that is missing": ('title="parts/numbers.py"', ""),
    "a command that fails": ("$ hotloop --version", "$ hotloop --versions"),
    "a command before the last": ("$ true", "$ false"),
    "another exit code": ("exit: 2", "exit: 1"),
    "a block that runs after all": ("<!-- no-run: takes an hour -->", ""),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_broken_block_is_caught(planted: str, tmp_path: Path, server: Server) -> None:
    right, wrong = PLANTED[planted]
    assert WORKING.count(right) == 1
    with pytest.raises(BlockError):
        run_page(WORKING.replace(right, wrong), tmp_path, server, dict(os.environ), more=False)


def test_a_killed_command_leaves_no_process(tmp_path: Path, server: Server) -> None:
    page = """
```python title="endless.py"
import os, time
open("pid", "w").write(str(os.getpid()))
time.sleep(600)
```
<!-- exit: 137 -->
```console
$ python endless.py & while [ ! -s pid ]; do sleep 0.1; done; kill -9 $!; wait $!
```
```console
$ while kill -0 $(cat pid) 2> /dev/null; do sleep 0.1; done
```
"""
    assert run_page(page, tmp_path, server, dict(os.environ), more=False) == 3


def test_comments_before_a_block_or_at_the_top() -> None:
    page = "# Page\n\n<!-- more -->\n\n```console\n$ a\n```\n\n```console\n$ b\n```\n"
    assert [block.is_more for block in blocks(page)] == [True, False]
    assert [block.is_more for block in blocks("<!-- more -->\n" + page)] == [True, True]
    assert [block.is_more for block in blocks(page.replace("-->\n", "-->\nA sentence.\n"))] == [False, False]


def test_each_command_of_readme_with_an_output_is_run() -> None:
    """A block with a command and its output is a console, which runs, or it isn't compared."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [block.line for block in blocks(page) if "\n$ " in f"\n{block.text}" and not is_run(block)] == []


SHOWN = ["epoch 1/5  train loss 0.8787  9,806 samples/s  0.1s", "[...]", "run: /tmp/a", "a step is 1.7 times as fast"]
PRINTED = ["epoch 1/5  train loss 0.8788  348 samples/s  3.7s", "epoch 2/5", "run: /home/b"]


@pytest.mark.parametrize(
    ("shown", "found", "is_same"),
    [
        (SHOWN, PRINTED, True),
        (SHOWN, [PRINTED[0].replace("0.8788", "1.9604"), *PRINTED[1:]], False),
        (SHOWN, [PRINTED[0].replace("train", "test"), *PRINTED[1:]], False),
        (SHOWN, PRINTED[:2], False),
        (SHOWN, [*PRINTED, "a warning"], False),
        (SHOWN, [PRINTED[0].replace("1/5", "1/6"), *PRINTED[1:]], False),
    ],
    ids=["times differ", "another figure", "another word", "a line less", "a line more", "another count"],
)
def test_an_output_is_compared_but_for_times_speeds_and_paths(
    shown: list[str], found: list[str], is_same: bool
) -> None:
    assert (difference(shown, found) == "") is is_same


def test_a_planted_wrong_output_is_caught(tmp_path: Path, server: Server) -> None:
    page = "```console\n$ hotloop --version\nhotloop 99.9.9\n```\n"
    with pytest.raises(BlockError, match=r"99\.9\.9"):
        run_page(page, tmp_path, server, dict(os.environ), more=False, compares=True)
