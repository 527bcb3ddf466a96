"""Byte-level BPE tokenizers: from the metadata of a GGUF file, or from a tokenizer.json with its config beside it.

The encoder knows no control tokens at all, so no text can produce one; they are put in by id, where the chat template
has them. The tests compare the ids with those of the engine's own tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Bpe
from tokenizers.models import BPE

from laneway.core.errors import ConfigError, InvalidRequest
from laneway.runtime.chat_template import ChatTemplate
from laneway.runtime.gguf_metadata import GgufMetadata, read_gguf
from laneway.runtime.tokenizer import ChatTurn, message_field, utf8

TOKEN_NORMAL, TOKEN_CONTROL = 1, 3
# Names that models give to the token that ends a turn, where it is not the one they call eos.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end|>", "<end_of_turn>")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class BpeTokenizer:
    """A Tokenizer over a byte-level BPE encoder that knows plain text only."""

    def __init__(
        self,
        encoder: Bpe,
        tokens: Sequence[bytes],
        control: Mapping[str, int],
        eos_ids: frozenset[int],
        template: ChatTemplate | None,
        *,
        bos_id: int | None = None,
    ) -> None:
        self._encoder = encoder
        self._tokens = tokens
        self._control = control
        self._template = template
        self._bos_id = bos_id
        self._absent_bytes = bytes(set(range(256)).difference(*(t for t in tokens if len(t) == 1)))
        self.eos_ids = eos_ids
        self.control_names = {i: name for name, i in control.items()}

    @property
    def vocabulary_size(self) -> int:
        return len(self._tokens)

    def encode(self, text: str) -> list[int]:
        self._check(text, "spec.generate.text")
        return self._with_bos(self._plain(text))

    def encode_chat(self, messages: Sequence[ChatTurn], *, continue_final: bool = False) -> list[int]:
        if self._template is None:
            raise InvalidRequest(
                "the model has no chat template; give it text or token ids", field="spec.generate.chat"
            )
        for index, turn in enumerate(messages):
            self._check(turn.content, message_field(index, "parts"))
        ids: list[int] = []
        for piece in self._template.render(messages, continue_final=continue_final):
            if piece.control:
                ids.append(self._control[piece.text])
            else:
                ids += self._plain(piece.text)
        return self._with_bos(ids)

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < len(self._tokens):
            raise ValueError(f"token id {token_id} is outside the vocabulary of {len(self._tokens)}")
        return self._tokens[token_id]

    def _check(self, text: str, field: str) -> None:
        """Some vocabularies lack bytes (of control characters, say); such text would lose characters unnoticed."""
        raw = utf8(text, field)
        if self._absent_bytes and len(raw.translate(None, self._absent_bytes)) < len(raw):
            character = next(c for c in text if self._lacks(c))
            raise InvalidRequest(
                f"the model's vocabulary cannot express the character U+{ord(character):04X}",
                field=field,
                reason="UNSUPPORTED_CHARACTER",
            )

    def _lacks(self, character: str) -> bool:
        return any(byte in self._absent_bytes for byte in character.encode())

    def _plain(self, text: str) -> list[int]:
        return self._encoder.encode(text, add_special_tokens=False).ids

    def _with_bos(self, ids: list[int]) -> list[int]:
        return ids if self._bos_id is None or ids[:1] == [self._bos_id] else [self._bos_id, *ids]


def from_gguf(path: Path) -> BpeTokenizer:
    """Raises ConfigError when the file is missing or holds another kind of tokenizer."""
    meta = read_gguf(path)
    kind = meta.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(f"{path}: its tokenizer is of the kind {kind}; only byte-level BPE (gpt2) can be read")
    tokens = meta.texts("tokenizer.ggml.tokens")
    types = meta.numbers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise ConfigError(f"{path}: {len(tokens)} tokens but {len(types)} token types")
    control = {t: i for i, t in enumerate(tokens) if types[i] == TOKEN_CONTROL}
    plain = {t: i for i, t in enumerate(tokens) if types[i] == TOKEN_NORMAL}
    merges = [(a, b) for a, _, b in (m.partition(" ") for m in meta.texts("tokenizer.ggml.merges"))]
    encoder = Bpe(BPE(plain, merges))
    _set_pre_tokenizer(encoder, meta)
    eos = {meta.number("tokenizer.ggml.eos_token_id"), meta.number("tokenizer.ggml.eot_token_id", -1)}
    eos |= {control[name] for name in END_OF_TURN if name in control}
    bos_id = meta.number("tokenizer.ggml.bos_token_id", -1)
    template = meta.text("tokenizer.chat_template")
    return BpeTokenizer(
        encoder,
        [b"" if types[i] == TOKEN_CONTROL else _bytes_of(t) for i, t in enumerate(tokens)],
        control,
        frozenset(eos - {-1}),
        _template(template, list(control), tokens, bos_id, meta.number("tokenizer.ggml.eos_token_id"))
        if template
        else None,
        bos_id=bos_id if meta.flag("tokenizer.ggml.add_bos_token") and bos_id >= 0 else None,
    )


def from_json(path: Path) -> BpeTokenizer:
    """A tokenizer.json; tokenizer_config.json beside it gives chat template and end token. Raises ConfigError."""
    try:
        encoder = Bpe.from_str(path.read_text())
        config_path = path.with_name("tokenizer_config.json")
        config = json.loads(config_path.read_text()) if config_path.exists() else {}
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: cannot read the tokenizer: {error}") from error
    if not isinstance(encoder.model, BPE) or "ByteLevel" not in str(encoder.decoder):
        raise ConfigError(f"{path}: only byte-level BPE tokenizers can be read")
    encoder.no_truncation()
    encoder.no_padding()
    encoder.encode_special_tokens = True  # the names of special tokens in a text are text
    added = encoder.get_added_tokens_decoder()
    control = {t.content: i for i, t in added.items() if t.special}
    vocabulary = encoder.get_vocab(with_added_tokens=True)
    tokens = [b""] * (max(vocabulary.values()) + 1)
    for token, i in vocabulary.items():
        if token not in control:
            tokens[i] = token.encode() if i in added else _bytes_of(token)
    names = [_name(config.get("eos_token")), *END_OF_TURN]
    eos_ids = frozenset(control[name] for name in names if name in control)
    bos = control.get(_name(config.get("bos_token")), -1)
    eos = control.get(names[0], -1)
    by_id = {i: name for name, i in control.items()}
    source = config.get("chat_template")
    template = (
        ChatTemplate(source, list(control), bos_token=by_id.get(bos, ""), eos_token=by_id.get(eos, ""))
        if isinstance(source, str)
        else None
    )
    bos_id = bos if config.get("add_bos_token") and bos >= 0 else None
    return BpeTokenizer(encoder, tokens, control, eos_ids, template, bos_id=bos_id)


def _template(source: str, control: list[str], tokens: list[str], bos_id: int, eos_id: int) -> ChatTemplate:
    bos = tokens[bos_id] if bos_id >= 0 else ""
    return ChatTemplate(source, control, bos_token=bos, eos_token=tokens[eos_id])


def _set_pre_tokenizer(encoder: Bpe, meta: GgufMetadata) -> None:
    """The split of text before BPE, by the name that llama.cpp gives it (src/llama-vocab.cpp)."""
    name = meta.text("tokenizer.ggml.pre", "gpt-2")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if name == "gpt-2":
        split: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(Regex(_GPT2), "isolated")]
    elif name == "smollm":
        digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
        split = [digits, pre_tokenizers.Split(Regex(_GPT2), "isolated")]
    elif name == "qwen2":
        split = [pre_tokenizers.Split(Regex(_QWEN2), "isolated")]
        encoder.normalizer = normalizers.NFC()
    else:
        raise ConfigError(
            f'{meta.path}: unknown pre-tokenizer "{name}"; known are gpt-2, smollm and qwen2. '
            "Give the pool the model's tokenizer.json as its tokenizer"
        )
    encoder.pre_tokenizer = pre_tokenizers.Sequence([*split, to_bytes])


def _name(token: object) -> str:
    """A special token in a tokenizer_config.json: a text, or an object with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_of_character()


def _bytes_of(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[c] for c in token])
    except KeyError:
        return token.encode()  # a word that was added as it is
