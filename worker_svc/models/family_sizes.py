"""The sizes that transformers assumes for a family if config.json lacks them.

A "-" is LLaMA's size, the default of `DecoderConfig.read`. Other fields have their defaults in the rows of families.
"""

import json
from collections.abc import Mapping
from typing import Any

_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
    *("tie_word_embeddings", "sliding_window", "moe_intermediate_size", "num_experts_per_tok"),
)
"""The columns of the table."""
_TABLE = """\
architecture               vocab hidden inner layers heads kv head positions       eps      theta tied window  moe top
MistralForCausalLM             -      - 14336      -     -  8    -    131072         -          -    -   4096    -   -
MinistralForCausalLM           -      - 14336      -     -  8    -    131072         -          -    -   4096    -   -
Qwen2ForCausalLM          151936      - 22016      -     - 32    -     32768         -          -    -   4096    -   -
Qwen3ForCausalLM          151936      - 22016      -     - 32  128     32768         -          -    -   4096    -   -
Phi3ForCausalLM            32064   3072  8192      -     -  -    -      4096      1e-5          -    -      -    -   -
GemmaForCausalLM          256000   3072 24576     28    16 16  256      8192         -          - true      -    -   -
Gemma2ForCausalLM         256000   2304  9216     26     8  4  256      8192         -          - true   4096    -   -
Gemma3ForCausalLM         262208   2304  9216     26     8  4  256    131072         -          - true   4096    -   -
Ministral3ForCausalLM     131072      - 14336     34     -  8  128    262144      1e-5          -    -      -    -   -
SmolLM3ForCausalLM        128256   2048     -     36    16  4    -     32768         -        2e6 true      -    -   -
SeedOssForCausalLM        155136      - 27648     64    80  8  128    524288         -          -    -      -    -   -
Olmo2ForCausalLM           50304      -     -      -     -  -    -         -      1e-5          -    -      -    -   -
Olmo3ForCausalLM           50304      -     -      -     -  -    -         -      1e-5          -    -   4096    -   -
ExaoneForCausalLM         102400      - 14336      -     -  8    -      4096      1e-5        5e5    -      -    -   -
Exaone4ForCausalLM        102400      - 16384      -     - 32    -         -      1e-5          -    -   4096    -   -
GlmForCausalLM            151552      - 13696     40     -  2  128    131072 1.5625e-7          -    -      -    -   -
Glm4ForCausalLM           151552      - 13696     40     -  2  128    131072 1.5625e-7          -    -      -    -   -
CohereForCausalLM         256000   8192 22528     40    64  -    -      8192         -        5e5 true      -    -   -
Cohere2ForCausalLM        256000   8192 22528     40    64  -    -      8192         -          - true   4096    -   -
Starcoder2ForCausalLM      49152   3072 12288     30    24  2    -      4096         -          - true      -    -   -
StableLmForCausalLM        50304   2560  6912      -     - 32    -      4096         -          -    -      -    -   -
Ernie4_5ForCausalLM       103424   1024  3072     18    16  2  128    131072      1e-5        5e5 true      -    -   -
HunYuanDenseV1ForCausalLM 290943      -     -      -     -  -    -         -      1e-5          -    -      -    -   -
OlmoForCausalLM            50304      -     -      -     -  -    -         -         -          -    -      -    -   -
HeliumForCausalLM          48000   2560  7040     24    20 20  128      4096      1e-8        1e5    -      -    -   -
ArceeForCausalLM               -   2560 18432      -     -  -    -      4096      1e-5          -    -      -    -   -
NemotronForCausalLM       256000   6144 24576      -    48  -    -      4096         -          -    -      -    -   -
Jais2ForCausalLM          150272   3328 26624      -    26  -    -      8192         -          -    -      -    -   -
VaultGemmaForCausalLM     256000   2304  9216     26     8  4  256      8192         -          - true   4096    -   -
CwmForCausalLM            128256   6144 21504     64    48  8  128    131072      1e-5        1e6    -   8192    -   -
MixtralForCausalLM             -      - 14336      -     -  8    -    131072      1e-5        1e6    -      -    -   -
Qwen2MoeForCausalLM       151936   2048  5632     24    16 16    -     32768         -          -    -   4096 1408   4
Qwen3MoeForCausalLM       151936   2048  6144     24    32  4    -     32768         -          -    -   4096  768   8
Glm4MoeForCausalLM        151552      - 10944     46    96  8    -    131072      1e-5          -    -      - 1408   8
SolarOpenForCausalLM      196608      -     -     48    64  8  128    131072      1e-5        1e6    -      - 1280   8
SarvamMoEForCausalLM      262144      -  8192     19    64  4   64    131072         -        8e6    -      - 1024   6
ExaoneMoeForCausalLM      102400      - 16384      -     - 32    -         -      1e-5          -    -   4096 1024   8
HYV3ForCausalLM           120832      - 13312     80    64  8  128    131072      1e-5 11158840.0    -      - 1536   8
MiniMaxM2ForCausalLM      200064   3072  1536     62    48  8  128    196608         -        5e6    -      -    -   -
PhimoeForCausalLM          32064      -  6400      -     -  8    -    131072      1e-5        1e6    -      -    -   -
GptOssForCausalLM         201088   2880  2880     36    64  8   64    131072      1e-5      1.5e5    -    128    -   -
OlmoeForCausalLM           50304   2048  2048     16    16  -    -      4096      1e-5          -    -      -    -   8
FlexOlmoForCausalLM       100352      -     -      -     -  -    -      4096         -        5e5    -      -    -   5
Dots1ForCausalLM          152064   4608 10944     62     - 32    -         -         -          -    -   4096 1408   -
Ernie4_5_MoeForCausalLM   103424   2560 12288     28    20  4    -    131072      1e-5        5e5 true      -    -   -
HunYuanMoEV1ForCausalLM   290943      -     -      -     -  -    -         -      1e-5          -    -      -    -   -
DeepseekV3ForCausalLM     129280   7168 18432     61   128  -    -      4096         -          -    -      - 2048   8
DeepseekForCausalLM       102400      -     -     30     -  -    -         -         -          -    -      - 1407   -
DeepseekV2ForCausalLM     102400      - 11008      -     -  -    -         -         -          -    -      - 1407   -
Glm4MoeLiteForCausalLM    154880   2048 10240     47    20  -    -    202752      1e-5          -    -      - 1536   4
YoutuForCausalLM          128256   2048  6144      -    16  -    -    131072         -          - true      -    -   -
MiniCPM3ForCausalLM        73448   2560  6400     62    40  -    -     32768      1e-5          - true      -    -   -
Qwen3_5ForCausalLM        248320      - 12288     32    16  4  256     32768         -          -    -      -    -   -
Qwen3_5MoeForCausalLM     248320   2048     -     40    16  2  256     32768         -          -    -      -  512   8
Qwen3NextForCausalLM      151936   2048  5632     48    16  2  256     32768         -          -    -      -  512  10
LaraMiniForCausalLM       151936   1024  5632     34    16  4  128    131072         -          - true    512  512   4
OlmoHybridForCausalLM     100352   3840     -      -    30  -    -     65536         -          -    -      -    -   -
KimiLinearForCausalLM     163840   2304  9216     27     - 32    -   1048576      1e-5          -    -      - 1024   -
Lfm2ForCausalLM            65536   2560 12288     32    32  8    -    128000         -        1e6 true      -    -   -
Lfm3ForCausalLM           128000   2048  7680     24    16  4  128    128000         -          - true      -    -   -
Lfm2MoeForCausalLM         65536   2048  7168     32    32  8    -    128000         -        1e6 true      - 1792   4
JambaForCausalLM           65536      - 14336      -     -  8    -    262144         -          -    -      -    -   2
MambaForCausalLM           50280    768     -      -     -  -    -    131072         -          - true      -    -   -
FalconMambaForCausalLM     50280    768     -      -     -  -    -    131072         -          - true      -    -   -
Mamba2ForCausalLM          32768      -     -     64     -  -    -    131072         -          -    -      -    -   -
NemotronHForCausalLM      131072      - 21504      -     -  8  128      4096         -          -    -      - 7688   2
FalconH1ForCausalLM       128000      - 14336      -     -  8    -      8192      1e-5          -    -      -    -   -
Zamba2ForCausalLM          32000   2560     -     54     -  -    -      4096      1e-5          - true      -    -   -
BambaForCausalLM          128000      - 14336      -     -  8    -    262144      1e-5          -    -      -    -   -
"""


def _read_table() -> Mapping[str, Mapping[str, Any]]:
    rows = (line.split() for line in _TABLE.splitlines()[1:])
    return {
        architecture: {name: json.loads(value) for name, value in zip(_FIELDS, values, strict=True) if value != "-"}
        for architecture, *values in rows
    }


SIZES = _read_table()
"""By architecture: fields of config.json and their values."""
