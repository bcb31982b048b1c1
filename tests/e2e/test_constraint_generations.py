"""Hundreds of answers of models with random weights and every kind of tokenizer: valid where they ended by themselves,
and the beginning of a valid one where they ended by their length."""

import asyncio
import json
from dataclasses import replace

import jsonschema
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from bench.grammar_schemas import all_schemas
from quire.client import Constraint, FinishReason, GenerationOptions
from quire.common.v1 import common_pb2
from tests.support.constraints import EOS, TOKENIZERS, make_template, mask_of
from tests.support.models import randomize
from tests.support.serving import serving

pytestmark = pytest.mark.extended

SEEDS = range(4)
MAX_TOKENS = 160
# Random models would otherwise write texts of any length.
BRIEF = ('"', "}", "]", ",")


def write_model(directory, tokenizer) -> None:
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=tokenizer.token_to_id(EOS), pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    randomize(model, 0)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", TOKENIZERS)
async def test_answers_match_their_schemas(kind, tmp_path) -> None:
    tokenizer = TOKENIZERS[kind]()
    write_model(tmp_path, tokenizer)
    ids = [tokenizer.encode(text, add_special_tokens=False).ids[-1] for text in BRIEF]
    schemas = all_schemas()

    def options(schema, seed: int) -> GenerationOptions:
        return GenerationOptions(
            temperature=1.0,
            seed=seed,
            max_tokens=MAX_TOKENS,
            constraint=Constraint(json_schema=json.dumps(schema)),
            logit_bias=dict.fromkeys(ids, float(seed)),
        )

    async with serving(model=str(tmp_path), dtype="float32", num_gpu_blocks=2048, max_num_seqs=128) as served:
        asked = [(name, options(schema, seed)) for name, schema in schemas.items() for seed in SEEDS]
        # No more schemas at once than one tenant may have compiled; each was checked when the others of it come.
        turns = asyncio.Semaphore(12)

        async def check(schema) -> None:
            async with turns:
                await served.client.generate([3, 4, 5], replace(options(schema, 0), max_tokens=1))

        await asyncio.gather(*map(check, schemas.values()))
        answers = await asyncio.gather(*(served.client.generate([3, 4, 5], each) for _, each in asked))
    num_ended = 0
    templates = {
        name: make_template(common_pb2.Constraint(json_schema=json.dumps(schema)), kind)
        for name, schema in schemas.items()
    }
    for (name, _), answer in zip(asked, answers, strict=True):
        (sequence,) = answer.sequences
        if sequence.finish_reason == FinishReason.STOP:
            num_ended += 1
            jsonschema.validate(json.loads(sequence.text), schemas[name], jsonschema.Draft202012Validator)
        else:
            template = templates[name]
            matcher = template.matcher(tuple(template.vocabulary.eos))
            for token_id in sequence.token_ids:
                matcher.consume(token_id)
            assert mask_of(matcher, template.vocabulary).any(), (name, sequence.text, matcher.error)
    # 3 kinds x 4 seeds x 66 schemas.
    assert len(answers) == len(SEEDS) * len(schemas)
    assert num_ended > 130, (num_ended, len(answers))
