"""``from dspark import Engine``: text and chats, streams, asyncio, and the command."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import dspark_each, environment
from dspark import Engine, SamplingParams
from dspark.errors import CheckpointError, DecodingError, TargetError

TEXT = "tom has 3 and gets 4"


@pytest.fixture(scope="module")
def engine(tiny_run: Path, tiny_target: Path) -> Engine:
    return Engine(tiny_target, tiny_run / "draft", max_context=256)


def chat(text: str = TEXT) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_importing_dspark_brings_no_torch() -> None:
    code = "import sys, dspark; dspark.SamplingParams(); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, env=environment())
    assert done.returncode == 0


def test_chats_ids_and_text_are_answered_together(engine: Engine) -> None:
    ids = engine.encode(chat())
    outputs = engine.generate([chat(), ids, engine.tokenizer.decode(ids[1:-1])])
    assert outputs[0].text == outputs[1].text
    assert outputs[0].text.startswith("tom has ")
    assert outputs[0].acceptance.accepted > 5
    assert outputs[0].completions[0].finish_reason == "stop"
    (one,) = engine.generate(chat())
    assert one.text == outputs[0].text
    assert engine.generate(ids)[0].text == one.text


def test_a_stream_adds_up_and_leaving_it_frees_everything(engine: Engine) -> None:
    whole = engine.generate(chat())[0].completions[0]
    pieces = list(engine.stream(chat()))
    assert "".join(d.text for d in pieces) == whole.text
    assert sum((d.ids for d in pieces), ()) == whole.ids
    assert len(pieces) < len(whole.ids), "several tokens a step"
    for number, _ in enumerate(engine.stream(chat())):
        if number == 2:
            break
    assert not engine.core.unfinished
    assert engine.core.pool.available == engine.core.pool.count


def test_asyncio_callers_share_batches_and_get_their_own_answers(engine: Engine) -> None:
    texts = [f"mia has {i} and gets {j}" for i in range(1, 4) for j in (2, 5)]
    alone = [engine.generate(chat(t), SamplingParams(temperature=1.0, seed=3))[0] for t in texts]

    async def one(text: str) -> str:
        params = SamplingParams(temperature=1.0, seed=3)
        return "".join([d.text async for d in engine.stream_async(chat(text), params)])

    async def impatient() -> None:
        async for _ in engine.stream_async(chat(), SamplingParams(max_new_tokens=200)):
            return

    async def everything() -> list:
        return await asyncio.gather(
            *(one(t) for t in texts),
            engine.generate_async(chat()),
            impatient(),
            engine.generate_async([1] * 999),
            return_exceptions=True,
        )

    *streamed, output, _, refused = asyncio.run(everything())
    assert streamed == [a.text for a in alone]
    assert output.text == engine.generate(chat())[0].text
    assert isinstance(refused, DecodingError)
    assert engine.core.pool.available == engine.core.pool.count
    assert not engine.core._groups


def test_an_aborted_async_request_ends(engine: Engine) -> None:
    async def cut() -> str | None:
        reason = None
        params = SamplingParams(max_new_tokens=200, ignore_eos=True)
        async for delta in engine.stream_async(chat(), params, "cut"):
            if delta.finish_reason is None:
                await engine.abort_async("cut")
            reason = delta.finish_reason
        return reason

    assert asyncio.run(cut()) == "abort"


def test_nothing_is_left_behind_when_one_of_many_prompts_is_refused(engine: Engine) -> None:
    with pytest.raises(DecodingError, match="prompt"):
        engine.generate([chat(), [1] * 999])
    assert not engine.core.unfinished
    with pytest.raises(DecodingError, match="one for each"):
        engine.generate([chat()], [SamplingParams()] * 2)
    with pytest.raises(DecodingError, match="chat messages"):
        engine.generate([[1, {"role": "user"}]])


def test_a_draft_without_a_named_target_needs_one(tiny_run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="target"):
        Engine(None)
    assert Engine(None, tiny_run / "draft", max_context=256).generate(chat())


def test_an_engine_refuses_a_draft_of_other_weights_and_warns_when_the_target_was_named(
    tiny_run: Path, tiny_target: Path, tmp_path: Path
) -> None:
    """Equal sizes run without an error and merely accept less."""
    shutil.copytree(tiny_run / "draft", tmp_path / "draft")
    config = tmp_path / "draft" / "config.json"
    raw = json.loads(config.read_text())
    raw["dspark_provenance"]["target_weights_hash"] = "0" * 64
    config.write_text(json.dumps(raw))
    with pytest.raises(TargetError, match="another weights"):
        Engine(None, tmp_path / "draft")
    with pytest.warns(UserWarning, match="another weights"):
        Engine(tiny_target, tmp_path / "draft", max_context=256)
    raw["dspark_provenance"]["tokenizer_hash"] = "0" * 64
    config.write_text(json.dumps(raw))
    with pytest.raises(TargetError, match="tokenizer"):
        Engine(tiny_target, tmp_path / "draft", max_context=256)


def test_the_command_prints_text_and_acceptance(tiny_run: Path, tiny_target: Path) -> None:
    target = ("--target", str(tiny_target), "--prompt", TEXT)
    done, plain, wrong = dspark_each(
        ["generate", str(tiny_run / "draft"), "--prompt", TEXT, "max_new_tokens=60"],
        ["generate", *target, "--json", "temperature=1.0", "seed=4", "n=2", "logprobs=1",
         "max_new_tokens=8"],
        ["generate", *target, "heat=1"],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith("tom has ")
    assert "acceptance length" in done.stderr
    assert plain.returncode == 0, plain.stderr
    shown = json.loads(plain.stdout)
    assert shown["acceptance"] is None
    assert len(shown["completions"]) == 2
    assert len(shown["completions"][0]["logprobs"]) == len(shown["completions"][0]["ids"])
    assert wrong.returncode == 2
    assert "temperature" in wrong.stderr
