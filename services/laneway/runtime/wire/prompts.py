"""A caller's prompt as a core value: exactly one kind, no NUL, nothing that no chat template renders."""

from __future__ import annotations

from laneway.core.errors import Unsupported
from laneway.core.prompt import ROLES, ChatPrompt, ChatTurn, Prompt, TextPrompt, TokenPrompt
from laneway.runtime.wire import checks
from laneway.runtime.wire.needs import Need
from laneway.v1 import task_pb2

MESSAGES_MAX = 2048
PARTS_MAX = 256


def parse_prompt(task: task_pb2.GenerateTask, field: str, needs: list[Need]) -> Prompt:
    match task.WhichOneof("prompt"):
        case "text":
            return TextPrompt(checks.filled(task.text, f"{field}.text"))
        case "chat":
            return _parse_chat(task.chat, f"{field}.chat", needs)
        case "tokens":
            checks.no_unknown_fields(task.tokens, f"{field}.tokens")
            if not task.tokens.ids:
                checks.refuse(f"{field}.tokens.ids", "must not be empty")
            return TokenPrompt(tuple(task.tokens.ids))
        case _:
            checks.refuse(f"{field}.prompt", "is missing: give text, chat or tokens")


def _parse_chat(chat: task_pb2.ChatPrompt, field: str, needs: list[Need]) -> ChatPrompt:
    checks.no_unknown_fields(chat, field)
    if not chat.messages:
        checks.refuse(f"{field}.messages", "must not be empty")
    checks.at_most(chat.messages, MESSAGES_MAX, f"{field}.messages")
    turns = tuple(_parse_turn(m, f"{field}.messages[{i}]", needs) for i, m in enumerate(chat.messages))
    if chat.continue_final_message and turns[-1].role != "assistant":
        checks.refuse(f"{field}.continue_final_message", "needs a last message of the role assistant")
    return ChatPrompt(turns, chat.continue_final_message)


def _parse_turn(message: task_pb2.ChatMessage, field: str, needs: list[Need]) -> ChatTurn:
    checks.no_unknown_fields(message, field)
    if message.role not in ROLES:
        checks.refuse(f"{field}.role", f"must be one of {', '.join(ROLES)}")
    if message.name:
        raise Unsupported(f"{field}.name is rendered by no chat template here", field=f"{field}.name")
    if message.role == "tool":
        needs.append(Need("tools", f"{field}.role"))
    if message.tool_calls:
        needs.append(Need("tools", f"{field}.tool_calls"))
    if message.tool_call_id:
        needs.append(Need("tools", f"{field}.tool_call_id"))
    if not message.parts and not message.tool_calls:
        checks.refuse(f"{field}.parts", "must not be empty")
    checks.at_most(message.parts, PARTS_MAX, f"{field}.parts")
    if len(message.parts) == 1:
        return ChatTurn(message.role, _parse_part(message.parts[0], f"{field}.parts[0]", needs))
    texts = [_parse_part(part, f"{field}.parts[{i}]", needs) for i, part in enumerate(message.parts)]
    return ChatTurn(message.role, "".join(texts))


def _parse_part(part: task_pb2.ContentPart, field: str, needs: list[Need]) -> str:
    checks.no_unknown_fields(part, field)
    kind = part.WhichOneof("part")
    if kind == "text":
        return checks.text(part.text, f"{field}.text")
    if kind is None:
        checks.refuse(field, "is empty: give text, image_url or image")
    needs.append(Need("image_input", f"{field}.{kind}"))
    return ""
