"""Where a setting comes from, and what happens to one that is wrong."""

import re
from pathlib import Path
from typing import Any

import pytest

from laneway.core.catalogue import Capabilities
from laneway.core.errors import ConfigError
from laneway.core.lanes import Lane
from laneway.runtime.catalogue import ENGINE_CAPABILITIES, TRITON_CAPABILITIES, capabilities_of, catalogue_of
from laneway.runtime.config_load import leaves
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.settings import (
    ModelSettings,
    Settings,
    WorkerSettings,
    load_settings,
    load_settings_with_origins,
    read_secret,
)


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(text: str) -> dict[str, Any]:
        (tmp_path / "laneway.toml").write_text(text, encoding="utf-8")
        return {"directory": tmp_path, "environ": {}}

    return write


def failure(**sources: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(**sources)
    return str(caught.value)


class TestOrder:
    def test_with_nothing_given_all_are_defaults(self, tmp_path):
        loaded = load_settings_with_origins(environ={}, directory=tmp_path)
        assert loaded.settings == Settings()
        assert set(loaded.origins.values()) == {"default"}
        assert set(loaded.origins) == {key for key, _ in leaves(loaded.settings)}

    def test_flags_win_over_environment_over_file_over_defaults(self, file, tmp_path):
        sources = file('[process]\ndrain_s = 1.0\nlog_level = "debug"\nlog_format = "json"\n')
        sources["environ"] = {"LANEWAY_PROCESS__DRAIN_S": "2.5", "LANEWAY_PROCESS__LOG_LEVEL": "error"}
        loaded = load_settings_with_origins(flags={"process.drain_s": "3"}, **sources)
        process = loaded.settings.process
        assert (process.drain_s, process.log_level, process.log_format) == (3.0, "error", "json")
        assert loaded.origins["process.drain_s"] == "flag for process.drain_s"
        assert loaded.origins["process.log_level"] == "env LANEWAY_PROCESS__LOG_LEVEL"
        assert loaded.origins["process.log_format"] == f"file {tmp_path / 'laneway.toml'}"
        assert loaded.origins["process.ready_file"] == "default"

    def test_a_part_of_a_nested_section_keeps_the_rest_of_its_defaults(self):
        settings = load_settings(environ={"LANEWAY_POLICY__PRIORITY__DEADLINE_S": "5"})
        lane = settings.policy.lane(Lane.PRIORITY)
        assert (lane.deadline_s, lane.ttft_target_s) == (5.0, 1.0)
        assert settings.policy.batch == Settings().policy.batch

    def test_lists_come_comma_separated_or_as_json(self):
        assert load_settings(environ={"LANEWAY_REGION__ZONES": "a, b"}).region.zones == ("a", "b")
        assert load_settings(environ={"LANEWAY_REGION__ZONES": '["a"]'}).region.zones == ("a",)
        models = '[{"name": "x", "engine": "simulated", "engine_options": {"pace_s": 0.5}}]'
        assert load_settings(environ={"LANEWAY_MODELS": models}).engine_options_of("x-small").pace_s == 0.5

    @pytest.mark.parametrize("how", ["flag", "environment"])
    def test_the_file_may_be_named(self, how, tmp_path):
        path = tmp_path / "other.toml"
        path.write_text('[region]\nname = "north"\n')
        sources: dict[str, Any] = (
            {"config": path, "environ": {}} if how == "flag" else {"environ": {"LANEWAY_CONFIG": str(path)}}
        )
        assert load_settings(**sources).region.name == "north"

    def test_names_kept_for_other_programs_are_no_settings(self):
        environ = {"LANEWAY_DATA_DIR": "/data", "LANEWAY_DOCKER_SETUP": "1", "HOME": "/root"}
        assert load_settings(environ=environ) == Settings()


class TestMistakes:
    def test_an_unknown_key_names_itself_its_origin_and_the_nearest(self, file):
        message = failure(**file("[admission]\nlisten_to = 'x'\n"))
        assert "admission.listen_to" in message
        assert "laneway.toml" in message
        assert "did you mean admission.listen?" in message

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("LANEWAY_ADMISION__LISTEN", "did you mean admission?"),
            ("LANEWAY_NATS__URLS", "did you mean nats.url?"),
            ("LANEWAY_NONSENSE", "known: process, region"),
            ("LANEWAY_NATS", "is a section"),
            ("LANEWAY_NATS__URL__X", "nats.url has no parts"),
            ("LANEWAY_MODELS__0__SLOTS", "models has no parts"),
        ],
    )
    def test_so_does_an_unknown_variable(self, name, said):
        message = failure(environ={name: "x"})
        assert said in message
        assert name in message

    @pytest.mark.parametrize(
        ("name", "value", "said"),
        [
            ("PROCESS__DRAIN_S", "nan", ">= 0.0"),
            ("PROCESS__DRAIN_S", "inf", "<= 2592000.0"),
            ("PROCESS__DRAIN_S", "-1", ">= 0.0"),
            ("PROCESS__DRAIN_S", "soon", "expected `float`"),
            ("PROCESS__LOG_LEVEL", "loud", "one of debug, error, info, warning"),
            ("ADMISSION__LISTEN", "7070", "host:port"),
            ("ADMISSION__INSECURE_REMOTE", "maybe", "expected `bool`"),
            ("NATS__REPLICAS", "2", "one of 1, 3, 5"),
            ("REGION__NAME", "eu.west", "A-Z a-z 0-9 _ -"),
            ("REGION__NAME", "eu\n", "A-Z a-z 0-9 _ -"),
            ("REGION__NAME", "r" * 28, "1 to 27"),
            ("REGION__ZONES", "[1", "JSON"),
            ("MODELS", "[]", "nothing could be served"),
            ("MODELS", '[{"name": "a", "slots": 0}]', "models[0].slots"),
            ("MODELS", '[{"name": "a", "slotz": 0}]', "did you mean models[0].slots?"),
            ("MODELS", '[{"name": "a"}, {"tier": "b"}]', "models[1]: object missing required field `name`"),
            ("MODELS", '[{"name": "a", "engine": "vllm"}]', "models[0].engine: must be one of openai, openvino"),
            ("MODELS", '[{"name": "a"}, {"name": "a"}]', "several models have the pool a-small"),
            ("POLICY__REFUSAL_JITTER_MIN", "9", "refusal_jitter_min is above refusal_jitter_max"),
        ],
    )
    def test_a_value_that_does_not_fit_stops_the_process(self, name, value, said):
        message = failure(environ={f"LANEWAY_{name}": value})
        assert said in message
        assert f"LANEWAY_{name}" in message

    @pytest.mark.parametrize("text", ["a = [", "x = 1", "[process]\ndrain_s = '1'", "process = 3"])
    def test_so_does_a_file_that_does_not(self, file, text):
        assert "laneway.toml" in failure(**file(text))

    def test_a_named_file_must_exist(self, tmp_path):
        assert "does not exist" in failure(config=tmp_path / "none.toml", environ={})


class TestSecrets:
    def test_a_secret_is_the_text_of_its_file(self, tmp_path):
        (tmp_path / "s").write_text("hush\n")
        assert read_secret(str(tmp_path / "s"), "nats.token_file") == "hush"

    @pytest.mark.parametrize("content", [None, b"", b"\n", b"\xff"])
    def test_a_missing_empty_or_binary_one_is_named_by_its_key(self, content, tmp_path):
        path = tmp_path / "s"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"nats\.token_file"):
            read_secret(str(path), "nats.token_file")


class TestCatalogue:
    def test_the_default_serves_one_small_model(self):
        (pool,) = catalogue_of(Settings()).pools
        assert (pool.name, pool.model, pool.tier, pool.engine) == ("chat-small", "chat", "small", "openvino")
        assert (pool.context_length, pool.vocabulary_size, pool.tokenizer) == (8192, 49_152, "smollm2")

    def test_an_exact_pool_says_so(self):
        model = ModelSettings(name="a", exact=True)
        settings = Settings(models=(model,))
        assert catalogue_of(settings).pools[0].capabilities.exact
        assert settings.engine_options_of("a-small").exact

    def test_tiers_keep_the_order_of_the_settings(self):
        models = tuple(ModelSettings(name="a", tier=tier, engine="simulated") for tier in ("z", "b"))
        assert [p.tier for p in catalogue_of(Settings(models=models)).tiers("a")] == ["z", "b"]

    def test_a_tokenizer_file_needs_its_vocabulary_size(self):
        with pytest.raises(ConfigError, match="vocabulary_size"):
            catalogue_of(Settings(models=(ModelSettings(name="a", tokenizer="/m/tokenizer.json"),)))

    def test_a_server_of_another_model_is_not_read_with_our_default_tokenizer(self):
        with pytest.raises(ValueError, match="tokenizer must be that of the model"):
            ModelSettings(name="a", engine="trtllm_grpc")
        with pytest.raises(ValueError, match="tokenizer must be that of the model"):
            ModelSettings(name="a", other_engines=("trtllm_grpc",))
        with pytest.raises(ValueError, match="tokenizer must be that of the model"):
            ModelSettings(name="a", engine="trtllm")
        assert ModelSettings(name="a", engine="trtllm_grpc", tokenizer="bytes").engine == "trtllm_grpc"

    def test_an_engine_without_an_adapter_is_not_offered(self):
        with pytest.raises(ConfigError, match="known: openai, openvino, simulated, triton, trtllm, trtllm_grpc"):
            capabilities_of("steam")

    def test_a_trtllm_pool_offers_schemas_and_adapters_where_its_engine_is_started_with_them(self):
        options = EngineOptions(guided_decoding="xgrammar", adapters=("law=/a/law",))
        for given, offers in ((options, True), (None, False), (EngineOptions(), False)):
            model = ModelSettings(name="a", engine="trtllm", tokenizer="bytes", engine_options=given)
            offered = catalogue_of(Settings(models=(model,))).pools[0].capabilities
            assert (offered.json_schema, offered.adapters) == (offers, offers)

    def test_an_unknown_pool_is_named(self):
        with pytest.raises(ConfigError, match="known: chat-small"):
            Settings().engine_options_of("x")

    def test_a_pool_of_several_engines_offers_what_all_of_them_can_do(self):
        model = ModelSettings(name="a", exact=True, tokenizer="smollm2", other_engines=("simulated", "trtllm_grpc"))
        offered = catalogue_of(Settings(models=(model,))).pools[0].capabilities
        for name in Capabilities.__struct_fields__:
            able = [getattr(ENGINE_CAPABILITIES[engine], name) for engine in (model.engine, *model.other_engines)]
            if name != "exact":
                assert getattr(offered, name) == min(able), name
        assert (offered.top_logprobs, offered.seed, offered.strict_isolation, offered.exact) == (0, False, False, False)

    def test_a_worker_with_another_engine_runs_it_with_its_own_options(self):
        own = EngineOptions(pace_s=0.5)
        model = ModelSettings(name="a", engine_options=EngineOptions(threads=2), other_engines=("simulated",))
        settings = Settings(models=(model,), worker=WorkerSettings(engine="simulated", engine_options=own))
        assert settings.engine_options_of("a-small") == own
        same = Settings(models=(model,), worker=WorkerSettings(engine="openvino", engine_options=own))
        assert same.engine_options_of("a-small").threads == 2

    def test_a_triton_pool_offers_what_its_dialect_has_and_without_one_the_least(self):
        def offered(**options: Any) -> Capabilities:
            model = ModelSettings(
                name="a", engine="triton", tokenizer="smollm2", engine_options=EngineOptions(address="h:1", **options)
            )
            return catalogue_of(Settings(models=(model,))).pools[0].capabilities

        assert offered(dialect="ids") == TRITON_CAPABILITIES["ids"]
        assert offered(dialect="bls").logprobs
        assert not offered(dialect="bls").token_ids_in
        assert not offered(dialect="llmapi").logprobs
        least = offered()
        for other in TRITON_CAPABILITIES.values():
            assert least.shared(other) == least

    def test_every_engine_of_the_settings_has_its_abilities(self):
        assert set(ENGINE_CAPABILITIES) == {"openai", "openvino", "simulated", "triton", "trtllm", "trtllm_grpc"}
        assert all(isinstance(offered, Capabilities) for offered in ENGINE_CAPABILITIES.values())


def test_every_setting_is_read_somewhere():
    root = Path(__file__).parents[2]
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("services", "scheduler", "workers")
        for path in (root / folder).rglob("*.py")
        if path.name not in ("settings.py", "engine_options.py")
    )
    names = {key.rpartition(".")[2] for key, _ in leaves(Settings())} | set(ModelSettings.__struct_fields__)
    behind_a_property = {f"ack_wait_{lane}_s" for lane in Lane}
    assert {name for name in names - behind_a_property if not re.search(rf"\b{name}\b", sources)} == set()
