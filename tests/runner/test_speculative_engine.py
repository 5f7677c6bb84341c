"""Loading with `draft=`: every drafter gives the plain text, in saved conversations too."""

import pytest
from loading.drafter_files import write_blocks, write_head, write_qwen

import turbospark

PROMPT = "Hello there, what is this?"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("drafters")
    return {
        "trunk": write_qwen(root / "trunk"),
        "blocks": write_blocks(root / "blocks"),
        "head": write_head(root / "head", prefix="", baked=True),
        "itself": root / "trunk",
    }


@pytest.fixture(scope="module")
def plain(folders):
    return turbospark.load(folders["trunk"], draft="off")


@pytest.fixture(scope="module", params=["auto", "mtp", "ngram", "blocks", "head", "itself"])
def engine(request, folders):
    draft = folders.get(request.param, request.param)
    return turbospark.load(folders["trunk"], draft=draft)


@pytest.mark.parametrize("block", [1, 3])
def test_the_text_is_the_plain_one(engine, plain, block):
    wanted = plain.generate(PROMPT, max_tokens=30)
    result = engine.generate(PROMPT, max_tokens=30, draft_block=block)
    assert str(result) == str(wanted)
    assert result.drafted > 0 or engine.drafter.name == "ngram"


def test_a_saved_conversation_drafts_on(engine, plain, tmp_path):
    session = engine.session("one")
    session.send(PROMPT, max_tokens=12, draft_block=2)
    session.save(tmp_path / "session")
    again = engine.load_session(tmp_path / "session", name="two")
    bare = plain.session("one")
    bare.send(PROMPT, max_tokens=12)
    wanted = str(bare.send(" more", max_tokens=8))
    results = [each.send(" more", max_tokens=8, draft_block=2) for each in (session, again)]
    assert [str(result) for result in results] == [wanted] * 2
    assert results[0].drafted == results[1].drafted
    bare.close(), session.close(), again.close()
