# Images of the services, each with what it needs and nothing else. Build one by its target:
#
#   docker build --target gateway --tag quire-gateway:0.2.0.dev0 .
#   docker build --target scheduler --tag quire-scheduler:0.2.0.dev0 .
#   docker build --target worker-cpu --tag quire-worker-cpu:0.2.0.dev0 --build-arg TORCH_INDEX_URL=... .
#   docker build --target worker-cuda --tag quire-worker-cuda:0.2.0.dev0 .
#
# TORCH_INDEX_URL is an index with the CPU build of torch: the default build for Linux brings gigabytes of CUDA, which
# worker-cuda needs and worker-cpu does not. All packages are those of constraints.txt. `make images` builds the images
# for CPUs.

# By its digest, so that the same base is built on until this line changes.
ARG PYTHON_IMAGE=python:3.11.15-slim-bookworm@sha256:d29f48a31a8b408ed19272ca1e7b10ebae13b240a27e862d3d4217c528e2e0c3

FROM ${PYTHON_IMAGE} AS packages
WORKDIR /src
# The dependencies change rarely: they are layers of their own.
COPY pyproject.toml constraints.txt ./
COPY tools/list_requirements.py tools/
ENV PIP_CONSTRAINT=/src/constraints.txt \
    PIP_BUILD_CONSTRAINT=/src/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_COMPILE=1 \
    PIP_IGNORE_INSTALLED=1 \
    PIP_PREFIX=/install \
    PIP_ROOT_USER_ACTION=ignore

FROM packages AS gateway-packages
RUN --mount=type=cache,target=/root/.cache/pip \
    python tools/list_requirements.py gateway tracing > requirements.txt \
    && pip install --requirement requirements.txt

FROM packages AS scheduler-packages
RUN --mount=type=cache,target=/root/.cache/pip \
    python tools/list_requirements.py scheduler tracing events > requirements.txt \
    && pip install --requirement requirements.txt

FROM packages AS worker-cpu-packages
ARG TORCH_INDEX_URL
RUN --mount=type=cache,target=/root/.cache/pip \
    python tools/list_requirements.py worker gguf transformers tracing > requirements.txt \
    && pip install --requirement requirements.txt ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"}

FROM packages AS worker-cuda-packages
RUN --mount=type=cache,target=/root/.cache/pip \
    python tools/list_requirements.py worker gguf transformers tracing > requirements.txt \
    && pip install --requirement requirements.txt

# The library of CPU kernels. Only a change of its sources compiles it again.
FROM ${PYTHON_IMAGE} AS kernels
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends cmake g++ make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY quire_kernels/cpu/CMakeLists.txt ./
COPY quire_kernels/cpu/attention attention
COPY quire_kernels/cpu/product product
COPY quire_kernels/cpu/runtime runtime
COPY quire_kernels/cpu/sampling sampling
COPY quire_kernels/cpu/states states
COPY quire_kernels/cpu/vec vec
# The instruction sets, such as "avx512;avx2": each takes a minute to compile. Empty: all.
ARG KERNEL_ISAS=
RUN cmake -S . -B build ${KERNEL_ISAS:+-DQUIRE_ISAS="$KERNEL_ISAS"} \
    && cmake --build build --parallel "$(nproc)" \
    && cmake --install build \
       --prefix "$(python -c 'import sysconfig; print(sysconfig.get_path("platlib", vars={"platbase": "/install"}))')"

# Quire itself. There is no compiler here, so its build leaves the kernels out.
FROM packages AS quire
RUN --mount=type=cache,target=/root/.cache/pip \
    python tools/list_requirements.py --build > requirements.txt \
    && PIP_PREFIX="" pip install --requirement requirements.txt cmake ninja
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --no-build-isolation .

FROM ${PYTHON_IMAGE} AS base
LABEL org.opencontainers.image.title="quire" \
      org.opencontainers.image.description="A server for large language models: PagedAttention as gRPC microservices" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN pip uninstall --yes --quiet --root-user-action=ignore pip setuptools wheel \
    && groupadd --system --gid 10001 quire \
    && useradd --system --uid 10001 --gid quire --no-create-home --home-dir /tmp --shell /usr/sbin/nologin quire
COPY deploy/healthcheck.py /opt/quire/healthcheck.py
# The file system may be read-only: nothing is written but below /tmp.
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp
# By number, so that an orchestrator can see that it is not root.
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["quire"]

FROM base AS gateway
COPY --from=gateway-packages /install /usr/local
COPY --from=quire /install /usr/local
# gRPC and HTTP.
EXPOSE 50051 8000
# Health is asked there, whatever certificate clients are shown.
ENV QUIRE_LOCAL_SOCKET=/tmp/gateway.sock
HEALTHCHECK --interval=15s --timeout=5s --start-period=600s \
    CMD ["python", "/opt/quire/healthcheck.py", "unix:/tmp/gateway.sock"]
CMD ["gateway"]

FROM base AS scheduler
COPY --from=scheduler-packages /install /usr/local
COPY --from=quire /install /usr/local
EXPOSE 50052
HEALTHCHECK --interval=15s --timeout=5s --start-period=600s \
    CMD ["python", "/opt/quire/healthcheck.py", "127.0.0.1:50052"]
CMD ["scheduler"]

FROM base AS worker-cpu
COPY --from=worker-cpu-packages /install /usr/local
COPY --from=kernels /install /usr/local
COPY --from=quire /install /usr/local
EXPOSE 50053
HEALTHCHECK --interval=15s --timeout=5s --start-period=600s \
    CMD ["python", "/opt/quire/healthcheck.py", "127.0.0.1:50053"]
CMD ["worker", "--device", "cpu"]

FROM base AS worker-cuda
# Triton compiles its launchers with a C compiler.
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
COPY --from=worker-cuda-packages /install /usr/local
COPY --from=kernels /install /usr/local
COPY --from=quire /install /usr/local
# What the container toolkit mounts of the driver.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 50053
HEALTHCHECK --interval=15s --timeout=5s --start-period=600s \
    CMD ["python", "/opt/quire/healthcheck.py", "127.0.0.1:50053"]
CMD ["worker", "--device", "cuda"]
