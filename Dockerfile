# SPDX-License-Identifier: Apache-2.0
# The Python package and command line, with code for GPUs:
#   docker build -t libmla .
#   docker run --rm --gpus all libmla libmla info
# For one kind of GPU, which builds faster: --build-arg MLA_CUDA_ARCHS=90
FROM debian:bookworm AS build
ARG CUDA=13-0
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates curl git python3 python3-venv \
 && curl -fsSLo /tmp/keyring.deb https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/cuda-keyring_1.1-1_all.deb \
 && dpkg -i /tmp/keyring.deb \
 && apt-get update \
 && apt-get install -y --no-install-recommends cuda-nvcc-${CUDA} cuda-cudart-dev-${CUDA}
COPY scripts/setup.sh /libmla/scripts/setup.sh
RUN /libmla/scripts/setup.sh build
COPY . /libmla
ARG MLA_CUDA_ARCHS="80;86;89;90;100;120"
RUN python3 -m venv /build \
 && export PATH=/usr/local/cuda/bin:$PATH LIBMLA_VERSION_LABEL=cu$(echo "${CUDA}" | tr -d -) \
 && /build/bin/pip wheel --no-cache-dir --wheel-dir /wheels /libmla \
    --config-settings=cmake.define.MLA_CUDA=ON "--config-settings=cmake.define.MLA_CUDA_ARCHS=${MLA_CUDA_ARCHS}"

FROM debian:bookworm-slim
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
RUN python3 -m venv /opt/libmla \
 && /opt/libmla/bin/pip install --no-cache-dir --find-links /wheels "$(echo /wheels/libmla-*.whl)[numpy]" \
 && rm -r /wheels
# What the container toolkit gives a container of the driver.
ENV PATH=/opt/libmla/bin:$PATH NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["libmla", "info"]
