"""Where the weights of our scorers and statistics are published. Read before a scorer is imported:
no torch here."""

from __future__ import annotations

_AESTHETIC = (
    "sac+logos+ava1-l14-linearMSE.pth of "
    "https://github.com/christophschuhmann/improved-aesthetic-predictor"
)

WEIGHTS: dict[str, dict[str, str]] = {
    "reward_models.aesthetic.Aesthetic": {
        "path": "hf download openai/clip-vit-large-patch14",
        "head": _AESTHETIC,
    },
    "reward_models.clap.Clap": {
        "path": "hf download laion/clap-htsat-unfused pytorch_model.bin",
        "processor": "hf download laion/clap-htsat-unfused",
    },
    "reward_models.clip_score.ClipScore": {"path": "hf download openai/clip-vit-large-patch14"},
    "reward_models.clip_statistics.ClipStatistics": {
        "path": "hf download openai/clip-vit-large-patch14"
    },
    "reward_models.dino_similarity.DinoSimilarity": {"path": "hf download facebook/dinov2-base"},
    "reward_models.edit_reward.EditReward": {
        "path": "hf download TIGER-Lab/EditReward-Qwen2.5-VL-7B model.safetensors",
        "processor": "hf download Qwen/Qwen2.5-VL-7B-Instruct",
        "template": "EditReward/dataset of https://github.com/TIGER-AI-Lab/EditReward",
    },
    "reward_models.hpsv2.HPSv2": {"path": "hf download xswu/HPSv2 HPS_v2.1_compressed.pt"},
    "reward_models.hpsv3.HPSv3": {
        "path": "hf download MizzenAI/HPSv3 HPSv3.safetensors",
        "processor": "hf download Qwen/Qwen2-VL-7B-Instruct",
        "template": "hpsv3/dataset/data_collator_qwen.py of https://github.com/MizzenAI/HPSv3",
    },
    "reward_models.image_reward.ImageReward": {
        "path": "hf download THUDM/ImageReward ImageReward.pt",
        "tokenizer": "hf download google-bert/bert-base-uncased",
    },
    "reward_models.image_similarity.ImageSimilarity": {
        "path": "hf download openai/clip-vit-large-patch14"
    },
    "reward_models.pickscore.PickScore": {"path": "hf download yuvalkirstain/PickScore_v1"},
    "reward_models.unified_reward.UnifiedReward": {
        "template": "inference_qwen/image_generation/qwen_point_score_image_generation.py of "
        "https://github.com/CodeGoat24/UnifiedReward",
    },
    "reward_models.video_align.VideoAlign": {
        "path": "hf download KwaiVGI/VideoReward checkpoint-11352/model.pth",
        "processor": "hf download Qwen/Qwen2-VL-2B-Instruct",
        "template": "prompt_template.py of https://github.com/KwaiVGI/VideoAlign",
    },
}
"""`_target_` of a scorer or statistic -> argument that says where weights are -> where they come
from."""

_WORDS = ("vocab.*", "merges.txt", "tokenizer*", "special_tokens_map.json", "added_tokens.json")
_NETWORK = (
    "config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
)
_PICTURES = ("config.json", "*processor_config.json", "chat_template*")


def files_read(argument: str) -> list[str]:
    """Return patterns of the files that a scorer opens in the hub's repository that its `argument`
    names. Repositories hold the same weights in further formats, which are left where they are."""
    own = {"tokenizer": (), "processor": _PICTURES, "template": ()}
    return [*own.get(argument, _NETWORK), *_WORDS]
