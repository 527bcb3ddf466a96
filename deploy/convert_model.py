"""Turns a packaged GGUF model into OpenVINO's own form: python convert_model.py MODULE FOLDER. For the image.

OpenVINO GenAI opens a GGUF file for writing, which a read-only image forbids, and converts it anew at each start. Its
own form is only read, takes half the CPU time to load, and lies once in memory for all workers of a machine.
"""

import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path

import openvino_genai


def main(module: str, target: Path) -> None:
    spec = importlib.util.find_spec(module)  # looked up, not imported: it is installed for its file alone
    if spec is None or spec.origin is None:
        sys.exit(f"the package {module} is not installed")
    (packaged,) = Path(spec.origin).parent.glob("*.gguf")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(shutil.copy(packaged, folder))
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = 8
        # What is saved appears beside the model.
        pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"enable_save_ov_model": True})
        target.mkdir(parents=True)
        for name in ("openvino_model.xml", "openvino_model.bin"):
            shutil.copyfile(model.with_name(name), target / name)
        # Of a folder, the end token is read from here alone.
        config = {"eos_token_id": pipeline.get_config().eos_token_id}
        (target / "generation_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
