"""What an `openai` pool may say of its providers, and how what is wrong is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laneway.core.catalogue import Pool
from laneway.core.errors import ConfigError
from laneway.runtime.catalogue import capabilities_of, pool_of
from laneway.runtime.engine_options import EngineOptions, ProviderOptions
from laneway.runtime.settings import ModelSettings, load_settings
from laneway.workers.engines.openai_options import checked_providers, key_of

POOL = Pool(
    name="rented",
    model="chat",
    tier="small",
    engine="openai",
    context_length=2048,
    vocabulary_size=260,
    slots=4,
    workers=1,
    kv_tokens=8192,
    tokenizer="bytes",
    capabilities=capabilities_of("openai"),
)


def provider(base_url: str = "https://api.example.com/v1", **options: Any) -> ProviderOptions:
    return ProviderOptions(base_url=base_url, **options)


@pytest.mark.parametrize(
    ("base_url", "name"),
    [
        ("https://api.example.com/v1", "api.example.com"),
        ("https://api.example.com:8443/openai/v1/", "api.example.com:8443"),
        ("http://localhost:8000/v1", "localhost:8000"),
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("http://[::1]:8000/v1", "[::1]:8000"),
    ],
)
def test_a_provider_is_named_by_its_host_and_asked_over_tls_or_on_this_machine(base_url: str, name: str):
    (checked,) = checked_providers(POOL, [provider(base_url)])
    assert (checked.name, checked.base_url) == (name, base_url.rstrip("/"))


@pytest.mark.parametrize(
    "base_url",
    [
        "",
        "api.example.com/v1",
        "ftp://api.example.com",
        "https://",
        "https:///v1",
        "https://api.example.com/v1?key=x",
        "https://api.example.com/v1#x",
        "https://api.example.com:port/v1",
        "https://api.example.com/v 1",
        "https://api.exämple.com/v1",
    ],
)
def test_what_is_no_base_url_is_refused(base_url: str):
    with pytest.raises(ConfigError, match="must be a URL as https"):
        checked_providers(POOL, [provider(base_url)])


def test_prompts_and_keys_go_over_the_network_in_plain_text_only_where_that_is_asked_for():
    for host in ("10.0.0.7", "llm.internal", "localhost.example.com", "0.0.0.0"):
        with pytest.raises(ConfigError, match="plain_http"):
            checked_providers(POOL, [provider(f"http://{host}/v1")])
        checked_providers(POOL, [provider(f"http://{host}/v1", plain_http=True)])


def test_a_password_in_the_url_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match="api_key_file") as raised:
        checked_providers(POOL, [provider("https://me:hunter2@api.example.com/v1")])
    assert "hunter2" not in str(raised.value)


def test_several_providers_have_names_of_their_own_and_say_their_model():
    with pytest.raises(ConfigError, match="providers is empty"):
        checked_providers(POOL, [])
    with pytest.raises(ConfigError, match=r"several providers are named api\.example\.com"):
        checked_providers(POOL, [provider(served_model="m"), provider(served_model="m")])
    with pytest.raises(ConfigError, match="b needs a served_model"):
        checked_providers(POOL, [provider(served_model="m"), provider(name="b")])
    two = [provider(served_model="m"), provider(name="b", served_model="m")]
    assert [each.name for each in checked_providers(POOL, two)] == ["api.example.com", "b"]


def test_a_key_comes_from_a_file_or_a_variable_and_a_bad_one_is_not_shown(tmp_path: Path):
    file = tmp_path / "key"
    file.write_text("sk-from-file\n")
    assert key_of(POOL, provider(), {}) == ""
    assert key_of(POOL, provider(api_key_file=str(file)), {}) == "sk-from-file"
    assert key_of(POOL, provider(api_key_env="THE_KEY"), {"THE_KEY": " sk-from-env "}) == "sk-from-env"
    with pytest.raises(ConfigError, match="THE_KEY is not set"):
        key_of(POOL, provider(api_key_env="THE_KEY"), {})
    with pytest.raises(ConfigError, match="not both"):
        key_of(POOL, provider(api_key_env="THE_KEY", api_key_file=str(file)), {"THE_KEY": "x"})
    for bad in ("sk-a\nsk-b", "sk-ä", "sk a", "sk-a\x00"):
        file.write_text(bad)
        with pytest.raises(ConfigError, match="one line of plain characters") as raised:
            key_of(POOL, provider(api_key_file=str(file)), {})
        assert "sk" not in str(raised.value)


def test_a_chat_route_needs_a_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checked_providers(POOL, [provider(route="chat")])
    monkeypatch.setattr("laneway.workers.engines.openai_options.load_tokenizer", lambda spec: WithoutTemplate())
    with pytest.raises(ConfigError, match='route = "chat" needs a chat template'):
        checked_providers(POOL, [provider(route="chat")])


class WithoutTemplate:
    def encode_chat(self, messages: Any) -> list[int]:
        from laneway.core.errors import InvalidRequest

        raise InvalidRequest("the model has no chat template", field="spec.generate.chat")


# --- in the settings -----------------------------------------------------------------------------------

TOML = """
[[models]]
name = "chat"
engine = "openai"
tokenizer = "smollm2"
context_length = 2048
kv_tokens = 8192
engine_options = { providers = [{ base_url = "https://api.example.com/v1", served_model = "m", api_key_file = "key" }] }
"""


def settings_of(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "laneway.toml"
    path.write_text(text)
    return load_settings(config=path, environ={})


def test_providers_are_given_inline_in_the_settings(tmp_path: Path):
    settings = settings_of(tmp_path, TOML)
    (found,) = settings.engine_options_of("chat-small").providers
    assert (found.base_url, found.served_model, found.route) == ("https://api.example.com/v1", "m", "completions")


def test_a_mistake_in_a_provider_is_told_with_its_key(tmp_path: Path):
    for mistake in ('rout = "chat"', 'route = "responses"'):
        with pytest.raises(ConfigError, match="rout"):
            settings_of(tmp_path, TOML.replace('served_model = "m"', mistake))
    with pytest.raises(ConfigError, match="tokenizer must be that of the model"):
        settings_of(tmp_path, TOML.replace('tokenizer = "smollm2"', ""))


def test_a_pool_says_that_its_runs_go_on_only_where_all_its_providers_take_ids():
    ids, text = provider(served_model="m"), provider(served_model="m", name="b", prompt_ids=False)
    chat = provider(served_model="m", name="c", route="chat")
    for providers, taken in (((ids,), True), ((ids, text), False), ((chat,), False), ((), True)):
        options = EngineOptions(providers=providers)
        assert capabilities_of("openai", options).token_ids_in is taken
        model = ModelSettings(
            name="chat", engine="openai", tokenizer="bytes", vocabulary_size=260, engine_options=options
        )
        assert pool_of(model).capabilities.token_ids_in is taken
