# An example image for training: Python, PyTorch and refill's client, for helm/examples/train.yaml.
#
#   docker build -f docker/train.Dockerfile -t training:latest .
#
# TORCH is the requirement; TORCH_INDEX the package index it comes from, if another than pip's own. PyTorch's index of
# builds for CPU makes an image that is a fraction of the size of one with CUDA:
#
#   --build-arg TORCH_INDEX=URL_OF_PYTORCHS_CPU_INDEX
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS build
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /source
COPY docker/build.lock docker/
RUN python -m venv /build \
    && /build/bin/pip install --require-hashes --only-binary :all: -r docker/build.lock \
    && python -m venv --without-pip /opt/train \
    && /build/bin/pip --python /opt/train/bin/python install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"
COPY pyproject.toml README.md LICENSE ./
COPY client client
COPY service service
RUN /build/bin/pip wheel --no-deps --no-build-isolation --no-index --wheel-dir /wheels . \
    && /build/bin/pip --python /opt/train/bin/python install "refill-cache[torch] @ file://$(echo /wheels/*.whl)"

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE}
LABEL org.opencontainers.image.title="training with refill" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin train
COPY --from=build /opt/train /opt/train
ENV PATH=/opt/train/bin:$PATH
USER 10001:10001
WORKDIR /home/train
CMD ["python"]
