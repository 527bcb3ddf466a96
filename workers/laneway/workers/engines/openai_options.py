"""What the options of an `openai` pool say of its providers, looked at before anything is sent. ConfigError says what.

Keys are read here, and go nowhere but into the client that sends them.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from msgspec.structs import replace

from laneway.core.catalogue import Pool
from laneway.core.errors import ConfigError, InvalidRequest
from laneway.core.prompt import ChatTurn
from laneway.runtime.engine_options import ProviderOptions
from laneway.runtime.settings import read_secret
from laneway.runtime.tokenizer import load_tokenizer


def checked_providers(pool: Pool, providers: Sequence[ProviderOptions]) -> tuple[ProviderOptions, ...]:
    """Each with a name of its own and a base_url that may be used."""
    if not providers:
        raise ConfigError(
            f"pool {pool.name}: engine_options.providers is empty; the openai engine needs one at least, as in "
            '[{ base_url = "https://api.example.com/v1", served_model = "a-model", api_key_file = "key" }]'
        )
    checked = tuple(replace(each, name=each.name or _host(pool, each), base_url=_url(pool, each)) for each in providers)
    names = [each.name for each in checked]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"pool {pool.name}: several providers are named {', '.join(twice)}; give each a name")
    for each in checked:
        if len(checked) > 1 and not each.served_model:
            raise ConfigError(f"pool {pool.name}: provider {each.name} needs a served_model, as there are several")
        if each.route == "chat":
            _check_template(pool)
    return checked


def key_of(pool: Pool, provider: ProviderOptions, environ: Mapping[str, str] = os.environ) -> str:
    """Empty where none is named."""
    who = f"pool {pool.name}: provider {provider.name}"
    if provider.api_key_file and provider.api_key_env:
        raise ConfigError(f"{who}: give api_key_file or api_key_env, not both")
    if provider.api_key_file:
        key = read_secret(provider.api_key_file, "api_key_file")
    elif provider.api_key_env:
        key = environ.get(provider.api_key_env, "").strip()
        if not key:
            raise ConfigError(f"{who}: the environment variable {provider.api_key_env} is not set")
    else:
        return ""
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{who}: the API key is not one line of plain characters")
    return key


def _url(pool: Pool, provider: ProviderOptions) -> str:
    host = _host(pool, provider)
    scheme = urlsplit(provider.base_url).scheme
    if scheme == "http" and not provider.plain_http and not _is_loopback(host):
        raise ConfigError(
            f"pool {pool.name}: base_url = {provider.base_url!r} would send prompts and the key in plain text: use "
            "https, or set plain_http = true in a network that is trusted"
        )
    return provider.base_url.rstrip("/")


def _host(pool: Pool, provider: ProviderOptions) -> str:
    """host or host:port of a base_url that is one."""
    try:
        parts = urlsplit(provider.base_url)
        _ = parts.port
    except ValueError:
        parts = urlsplit("")
    good = parts.scheme in ("http", "https") and parts.hostname and not (parts.query or parts.fragment)
    if "@" in parts.netloc:  # not shown: it may be a password
        raise ConfigError(f"pool {pool.name}: base_url must hold no user or password: name a key with api_key_file")
    if not good or not provider.base_url.isascii() or any(c.isspace() for c in provider.base_url):
        raise ConfigError(
            f"pool {pool.name}: base_url = {provider.base_url!r} must be a URL as https://api.example.com/v1, without "
            "a query"
        )
    return parts.netloc


def _is_loopback(netloc: str) -> bool:
    host = urlsplit(f"//{netloc}").hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_template(pool: Pool) -> None:
    try:
        load_tokenizer(pool.tokenizer).encode_chat([ChatTurn("user", "Hi")])
    except InvalidRequest as error:
        raise ConfigError(f'pool {pool.name}: route = "chat" needs a chat template in its tokenizer: {error}') from None
