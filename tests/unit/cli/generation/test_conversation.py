"""A conversation: what is asked, what is remembered, what the commands do."""

import json

from penstock.cli.generation.conversation import HELP, AskModel, Conversation, Quit, Save, Say


def test_messages_are_remembered() -> None:
    talk = Conversation("m", "Be brief")
    assert talk.heard("hello\n") == AskModel()
    talk.answered("hi")
    assert talk.heard("//not a command") == AskModel()
    assert [each["content"] for each in talk.messages] == ["Be brief", "hello", "hi", "/not a command"]
    talk.answered("")  # nothing came of it
    assert [each["role"] for each in talk.messages] == ["system", "user", "assistant"]


def test_commands() -> None:
    talk = Conversation("m")
    assert talk.heard("  ") is None
    assert talk.heard("/help") == Say(HELP)
    assert talk.heard("/system  You are a river. ") == Say("system message set")
    assert talk.messages == [{"role": "system", "content": "You are a river."}]
    talk.heard("hello")
    assert talk.heard("/clear") == Say("the conversation begins anew")
    assert len(talk.messages) == 1
    talk.heard("/system")
    assert talk.messages == []
    assert talk.heard("/model other") == Say("the model is other")
    assert talk.heard("/quit") == Quit()
    assert "/help" in str(talk.heard("/nothing"))


def test_saving() -> None:
    talk = Conversation("m", "Be brief")
    talk.heard("how high is the river in Zürich?")
    talk.answered("four metres")
    as_text = talk.heard("/save talk.txt")
    assert as_text == Save(
        "talk.txt", "system: Be brief\n\nuser: how high is the river in Zürich?\n\nassistant: four metres\n"
    )
    as_json = talk.heard("/save talk.json")
    assert isinstance(as_json, Save)
    assert json.loads(as_json.contents) == {"model": "m", "messages": talk.messages}
    assert "give it a name" in str(talk.heard("/save"))
