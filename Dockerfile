# Untested: no builder was at hand when it was written. `docker build -t digenrl .` for CPU;
# `docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 -t digenrl:cuda .` for NVIDIA GPUs
# (run with `--gpus all --ipc=host`; the driver is the host's).
FROM python:3.12-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_WAIT_POLICY=passive

RUN useradd --create-home digenrl
WORKDIR /home/digenrl/app

# PyTorch first and alone: it is the large layer, and only its index differs between CPU and CUDA.
COPY constraints.txt ./
RUN grep -E '^(torch|torchvision)==' constraints.txt > torch.txt \
    && pip install -r torch.txt --index-url ${TORCH_INDEX} --extra-index-url https://pypi.org/simple && rm torch.txt

COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY reward_models reward_models
COPY configs configs
RUN grep -vE '^(torch|torchvision|nvidia-|triton)' constraints.txt > own.txt \
    && pip install -c own.txt '.[ocr,ray,serve,video]' && rm own.txt && chown digenrl .

USER digenrl
ENTRYPOINT ["digenrl"]
CMD ["train", "max_rl_steps=40"]
