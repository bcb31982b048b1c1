# The names of transformers that this project uses. Its own __init__.py names all of its hundreds of models, which costs
# the type checker minutes; submodules are read where they are.
from transformers.cache_utils import DynamicCache as DynamicCache
from transformers.configuration_utils import PreTrainedConfig as PreTrainedConfig
from transformers.configuration_utils import PretrainedConfig as PretrainedConfig
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.masking_utils import AttentionMaskInterface as AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING as MODEL_FOR_CAUSAL_LM_MAPPING,
)
from transformers.models.auto.modeling_auto import (
    AutoModel as AutoModel,
)
from transformers.models.auto.modeling_auto import (
    AutoModelForCausalLM as AutoModelForCausalLM,
)
from transformers.models.auto.modeling_auto import (
    AutoModelForSequenceClassification as AutoModelForSequenceClassification,
)
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.bert.configuration_bert import BertConfig as BertConfig
from transformers.models.bert.modeling_bert import BertModel as BertModel
from transformers.models.bloom.configuration_bloom import BloomConfig as BloomConfig
from transformers.models.camembert.configuration_camembert import CamembertConfig as CamembertConfig
from transformers.models.distilbert.configuration_distilbert import DistilBertConfig as DistilBertConfig
from transformers.models.falcon_mamba.configuration_falcon_mamba import FalconMambaConfig as FalconMambaConfig
from transformers.models.gemma2.configuration_gemma2 import Gemma2Config as Gemma2Config
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig as Gemma3TextConfig
from transformers.models.gpt2.configuration_gpt2 import GPT2Config as GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel as GPT2LMHeadModel
from transformers.models.gte.configuration_gte import GteConfig as GteConfig
from transformers.models.llama.configuration_llama import LlamaConfig as LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM as LlamaForCausalLM
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig as Llama4TextConfig
from transformers.models.mistral.configuration_mistral import MistralConfig as MistralConfig
from transformers.models.mixtral.configuration_mixtral import MixtralConfig as MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM as MixtralForCausalLM
from transformers.models.modernbert.configuration_modernbert import ModernBertConfig as ModernBertConfig
from transformers.models.mpnet.configuration_mpnet import MPNetConfig as MPNetConfig
from transformers.models.mpt.configuration_mpt import MptConfig as MptConfig
from transformers.models.nomic_bert.configuration_nomic_bert import NomicBertConfig as NomicBertConfig
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config as Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM as Qwen2ForCausalLM
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig as Qwen2_5_VLTextConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config as Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM as Qwen3ForCausalLM
from transformers.models.roberta.configuration_roberta import RobertaConfig as RobertaConfig
from transformers.models.xlm_roberta.configuration_xlm_roberta import XLMRobertaConfig as XLMRobertaConfig
from transformers.models.xlm_roberta.tokenization_xlm_roberta import XLMRobertaTokenizer as XLMRobertaTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
from transformers.trainer_utils import set_seed as set_seed

__version__: str
