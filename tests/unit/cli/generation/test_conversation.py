"""A conversation: the questions, the remembered messages, and the commands."""

import json

from penstock.cli.generation.conversation import HELP, AskModel, Conversation, Print, Quit, Save


def test_messages_are_remembered() -> None:
    talk = Conversation("m", "Be brief")
    assert talk.handle_line("hello\n") == AskModel()
    talk.add_answer("hi")
    assert talk.handle_line("//not a command") == AskModel()
    assert [each["content"] for each in talk.messages] == ["Be brief", "hello", "hi", "/not a command"]
    talk.add_answer("")  # the model returned nothing
    assert [each["role"] for each in talk.messages] == ["system", "user", "assistant"]


def test_commands_change_the_conversation() -> None:
    talk = Conversation("m")
    assert talk.handle_line("  ") is None
    assert talk.handle_line("/help") == Print(HELP)
    assert talk.handle_line("/system  You are a river. ") == Print("system message set")
    assert talk.messages == [{"role": "system", "content": "You are a river."}]
    talk.handle_line("hello")
    assert talk.handle_line("/clear") == Print("new conversation")
    assert len(talk.messages) == 1
    talk.handle_line("/system")
    assert talk.messages == []
    assert talk.handle_line("/model other") == Print("the model is other")
    assert talk.handle_line("/quit") == Quit()
    assert "/help" in str(talk.handle_line("/nothing"))


def test_a_conversation_is_saved_to_a_file() -> None:
    talk = Conversation("m", "Be brief")
    talk.handle_line("how high is the river in Zürich?")
    talk.add_answer("four metres")
    as_text = talk.handle_line("/save talk.txt")
    assert as_text == Save(
        "talk.txt", "system: Be brief\n\nuser: how high is the river in Zürich?\n\nassistant: four metres\n"
    )
    as_json = talk.handle_line("/save talk.json")
    assert isinstance(as_json, Save)
    assert json.loads(as_json.contents) == {"model": "m", "messages": talk.messages}
    assert "needs a file name" in str(talk.handle_line("/save"))
