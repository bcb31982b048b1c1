# One CPU image for all three services; the command chooses: quire gateway, quire scheduler, quire worker, quire serve.
#
#   docker build --tag quire:cpu .
#   docker build --tag quire:cpu --build-arg TORCH_INDEX_URL=... .   with an index that has the CPU build of torch: the
#                                                                    default build for Linux brings gigabytes of CUDA

ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# The dependencies change rarely: they are a layer of their own.
ARG TORCH_INDEX_URL
COPY pyproject.toml constraints.txt ./
COPY tools/list_requirements.py tools/
RUN --mount=type=cache,target=/root/.cache/pip \
    python tools/list_requirements.py gateway scheduler worker gguf transformers certs tracing events > requirements.txt \
    && pip wheel --wheel-dir /wheels --constraint constraints.txt --requirement requirements.txt \
        ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"}
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip \
    PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt pip wheel --wheel-dir /wheels --no-deps .

FROM python:${PYTHON_VERSION}-slim AS runtime
LABEL org.opencontainers.image.title="quire" \
      org.opencontainers.image.description="A server for large language models: PagedAttention as gRPC microservices" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --find-links /wheels 'quire[all]' \
    && groupadd --system --gid 10001 quire \
    && useradd --system --uid 10001 --gid quire --no-create-home --shell /usr/sbin/nologin quire
COPY deploy/healthcheck.py /opt/quire/healthcheck.py
# The file system may be read-only: nothing is written but below /tmp.
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp
# By number, so that an orchestrator can see that it is not root.
USER 10001:10001
WORKDIR /tmp
# Gateway gRPC, scheduler, worker, gateway HTTP.
EXPOSE 50051 50052 50053 8000
ENTRYPOINT ["quire"]
CMD ["--help"]
