"""Who a caller is, and who may not call at all."""

import asyncio
import contextvars
import hashlib
from pathlib import Path

import pytest

from laneway.core.errors import ConfigError, PermissionDenied, Unauthenticated
from laneway.core.lanes import LANES, Lane
from laneway.runtime.auth import (
    Authenticator,
    Caller,
    check_binding,
    check_metrics_binding,
    current_caller,
    is_loopback,
    load_authenticator,
    load_tokens,
    require_lane,
    require_operator,
    set_caller,
)
from laneway.runtime.settings import AdmissionSettings, ProcessSettings

LOCAL, REMOTE = "ipv4:127.0.0.1:50000", "ipv4:10.0.0.7:50000"


def bearer(token: str, key: str = "authorization") -> list[tuple[str, str | bytes]]:
    return [(key, f"Bearer {token}")]


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    (tmp_path / "ops").write_text("operator-token\n")
    path = tmp_path / "tokens.toml"
    path.write_text(
        f"""
        [[token]]
        sha256 = "{hashlib.sha256(b"acme-token").hexdigest()}"
        tenant = "acme"
        lanes = ["batch"]
        [[token]]
        value_file = "{tmp_path / "ops"}"
        tenant = "ops"
        role = "operator"
        """
    )
    return path


class TestWithoutTokens:
    @pytest.mark.parametrize("peer", [LOCAL, "ipv6:%5B::1%5D:5", "ipv6:[::ffff:127.0.0.1]:5", "unix:/tmp/x"])
    def test_this_host_calls_as_the_default_tenant(self, peer):
        caller = Authenticator(None).authenticate([], peer)
        assert caller == Caller("default", "operator", frozenset(LANES))

    @pytest.mark.parametrize("peer", [REMOTE, "ipv6:%5Bfe80::1%5D:5", "ipv4:0.0.0.0:1", "", "dns:localhost"])
    def test_another_host_does_not(self, peer):
        with pytest.raises(Unauthenticated):
            Authenticator(None).authenticate([], peer)

    def test_unless_that_was_allowed_and_then_not_as_operator(self):
        assert Authenticator(None, insecure_remote=True).authenticate([], REMOTE) == Caller("default", "tenant")

    def test_other_headers_mean_nothing(self):
        metadata = [("x-tenant-id", "acme"), ("x-role", "operator"), ("x-forwarded-for", "127.0.0.1")]
        with pytest.raises(Unauthenticated):
            Authenticator(None).authenticate(metadata, REMOTE)
        assert Authenticator(None).authenticate(metadata, LOCAL).tenant == "default"


class TestWithTokens:
    def test_a_token_names_tenant_role_and_lanes(self, tokens_file):
        authenticator = load_authenticator(AdmissionSettings(tokens_file=str(tokens_file)))
        acme = authenticator.authenticate(bearer("acme-token"), REMOTE)
        assert acme == Caller("acme", "tenant", frozenset({Lane.BATCH}))
        operator = authenticator.authenticate(bearer("operator-token"), REMOTE)
        assert operator == Caller("ops", "operator", frozenset(LANES))

    @pytest.mark.parametrize(
        "metadata",
        [
            [],
            bearer("wrong"),
            bearer(""),
            bearer("acme-token", "x-authorization"),
            [("authorization", "acme-token")],
            [("authorization", "Basic acme-token")],
            bearer("acme-token") + bearer("acme-token"),
            [("authorization", b"Bearer acme-token")],
        ],
    )
    def test_anything_else_is_refused_even_from_this_host(self, tokens_file, metadata):
        authenticator = load_authenticator(AdmissionSettings(tokens_file=str(tokens_file), insecure_remote=True))
        with pytest.raises(Unauthenticated) as caught:
            authenticator.authenticate(metadata, LOCAL)
        assert "acme-token" not in str(caught.value)

    @pytest.mark.parametrize(
        "text",
        [
            "token = 3",
            "[[token]]\nsha256 = 'abc'\ntenant = 'a'",
            "[[token]]\ntenant = 'a'",
            "[[token]]\nsha256 = '" + "0" * 64 + "'\ntenant = 'a.b'",
            "[[token]]\nsha256 = '" + "0" * 64 + "'\ntenant = 'a'\nrole = 'root'",
            "[[token]]\nsha256 = '" + "0" * 64 + "'\ntenant = 'a'\nvalue = 'plain'",
            "[[token]]\nvalue_file = '/none'\ntenant = 'a'",
            ("[[token]]\nsha256 = '" + "0" * 64 + "'\ntenant = 'a'\n") * 2,
        ],
    )
    def test_a_file_with_a_mistake_stops_the_process(self, tmp_path, text):
        path = tmp_path / "tokens.toml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"tokens\.toml"):
            load_tokens(str(path))


class TestBinding:
    @pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0", "localhost:7070"])
    def test_this_host_needs_nothing(self, listen):
        check_binding(listen, AdmissionSettings())

    @pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "10.0.0.7:7070", "door.example:7070"])
    def test_others_need_tokens_and_tls_or_the_explicit_word(self, listen):
        for settings, tls in ((AdmissionSettings(), True), (AdmissionSettings(tokens_file="t"), False)):
            with pytest.raises(ConfigError, match="insecure_remote"):
                check_binding(listen, settings, tls=tls)
        check_binding(listen, AdmissionSettings(tokens_file="t"), tls=True)
        check_binding(listen, AdmissionSettings(insecure_remote=True))


class TestMetricsBinding:
    @pytest.mark.parametrize("listen", ["", "127.0.0.1:0", "[::1]:9090"])
    def test_this_host_needs_nothing(self, listen):
        check_metrics_binding(ProcessSettings(metrics_listen=listen))

    @pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:9090", "10.0.0.7:9090"])
    def test_others_need_the_explicit_word(self, listen):
        with pytest.raises(ConfigError, match="metrics_remote"):
            check_metrics_binding(ProcessSettings(metrics_listen=listen))
        check_metrics_binding(ProcessSettings(metrics_listen=listen, metrics_remote=True))


class TestCurrentCaller:
    def test_there_is_none_outside_a_call(self):
        with pytest.raises(Unauthenticated):
            contextvars.Context().run(current_caller)

    async def test_each_task_has_its_own(self):
        async def call(tenant: str) -> str:
            set_caller(Caller(tenant))
            await asyncio.sleep(0)
            return current_caller().tenant

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call(tenant)) for tenant in "abc"]
        assert [task.result() for task in tasks] == list("abc")

    def test_operators_and_lanes(self):
        def check() -> None:
            set_caller(Caller("acme", "tenant", frozenset({Lane.BATCH})))
            with pytest.raises(PermissionDenied):
                require_operator()
            require_lane(current_caller(), Lane.BATCH)
            with pytest.raises(PermissionDenied) as caught:
                require_lane(current_caller(), Lane.PRIORITY)
            assert caught.value.field == "spec.contract.lane"

        contextvars.copy_context().run(check)


def test_loopback_is_an_address_not_a_name_that_starts_like_one():
    assert not is_loopback("ipv4:127.0.0.1.evil.example:1")
    assert is_loopback("ipv4:127.8.9.1:1")
