"""`kill -9` anywhere: the finished answers are those of an undisturbed run, byte for byte."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from client.scripted_server import scripted
from data.answer_sets import asked, section_of
from data.answering_server import KIMI, AnsweringServer, by_script, byte_tokenizer
from dspark.artifacts.progress import OnDone, untold
from dspark.data.answer_journal import UNFINISHED, Journal
from dspark.hidden.answers import Answer, answer_files
from told import Told

TESTS = Path(__file__).parent.parent
SCRIPT = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from data.test_answers_killed import once
once(sys.argv[1], Path(sys.argv[2]))
"""
PROMPTS = asked(*([f"question {n}", f"and {n}?"][: 1 + n % 2] for n in range(40)))


def once(url: str, folder: Path, told: OnDone = untold) -> None:
    from data.answer_sets import answers_of, served

    section = section_of(url, temperatures=(0.0, 1.0))
    answers_of(PROMPTS, served(byte_tokenizer(KIMI), section), section, folder, told)


def start(url: str, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, url, str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in [*answer_files(folder), folder / "report.json"]
    }


def test_killed_at_random_points_and_run_again_gives_the_same_files(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(KIMI)

    def answer(text: str) -> str:
        time.sleep(0.02)
        return f"<think>hm</think>{hash(text[-30:]) % 7 * 'so '}yes"

    with scripted(AnsweringServer(tokenizer, by_script(tokenizer, answer))) as running:
        once(running.url, tmp_path / "undisturbed", told := Told())
        assert (told.made, told.kept) == (len(PROMPTS), 0)
        once(running.url, tmp_path / "undisturbed", told := Told())
        assert (told.made, told.kept) == (0, len(PROMPTS))
        rng, killed, asked_before = random.Random(1), 0, 0
        while killed < 2:
            process = start(running.url, tmp_path / "killed")
            seen = len(running.seen)
            while len(running.seen) < seen + rng.randint(14, 26) and process.poll() is None:
                time.sleep(0.003)
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                killed += 1
            process.communicate()
            assert not answer_files(tmp_path / "killed")
        asked_before = len(running.seen)
        process = start(running.url, tmp_path / "killed")
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
        assert len(running.seen) - asked_before < 60 + 2  # all turns, and two looks at the models
    assert contents(tmp_path / "killed") == contents(tmp_path / "undisturbed")


def answer_of(name: str) -> Answer:
    return Answer(
        id=name, category="chat", temperature=0.0, prompt_length=1, finish_reason="stop", ids=(1, 2, 3)
    )  # fmt: skip


def test_a_torn_record_is_cut_off_wherever_it_was_torn(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add("a", [answer_of("a"), answer_of("a-1")], {"finish stop": 2})
    whole = (tmp_path / UNFINISHED).stat().st_size
    journal.add("b", [answer_of("b")], {})
    journal.close()
    content = (tmp_path / UNFINISHED).read_bytes()
    for size in range(whole, len(content)):
        (tmp_path / UNFINISHED).write_bytes(content[:size])
        again = Journal(tmp_path)
        assert list(again.places) == ["a"]
        again.add("c", [], {"dropped empty": 1})
        assert again.read("c") == (
            {"prompt": "c", "rows": 0, "tally": {"dropped empty": 1}, "facts": []},
            [],
        )
        header, rows = again.read("a")
        assert (header["tally"], len(rows)) == ({"finish stop": 2}, 2)
        again.close()
