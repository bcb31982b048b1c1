"""What the protocol tells of the model: its tensors, its configuration and its statistics."""

from gateway.kserve.inference_convert import INPUTS, OUTPUTS
from gateway.kserve.response_convert import MODEL_VERSION
from gateway.metrics import Durations, RequestStatistics
from quire.inference import open_inference_pb2 as pb

PLATFORM = "quire"
_REQUIRED = "text_input"
_DATA_TYPES = {
    "BOOL": pb.TYPE_BOOL,
    "BYTES": pb.TYPE_STRING,
    "FP32": pb.TYPE_FP32,
    "UINT32": pb.TYPE_UINT32,
}


def model_metadata(name: str) -> pb.ModelMetadataResponse:
    return pb.ModelMetadataResponse(
        name=name, versions=[MODEL_VERSION], platform=PLATFORM, inputs=_tensors(INPUTS), outputs=_tensors(OUTPUTS)
    )


def model_config(name: str) -> pb.ModelConfig:
    """The configuration by which Triton would serve such a model."""
    return pb.ModelConfig(
        name=name,
        platform=PLATFORM,
        backend=PLATFORM,
        version_policy=pb.ModelVersionPolicy(specific=pb.ModelVersionPolicy.Specific(versions=[int(MODEL_VERSION)])),
        # Shapes have no batch dimension: prompts of one tensor are a batch as they are.
        max_batch_size=0,
        input=[
            pb.ModelInput(name=tensor, data_type=_DATA_TYPES[datatype], dims=[-1], optional=tensor != _REQUIRED)
            for tensor, datatype in INPUTS.items()
        ],
        output=[
            pb.ModelOutput(name=tensor, data_type=_DATA_TYPES[datatype], dims=[-1])
            for tensor, datatype in OUTPUTS.items()
        ],
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
    )


def model_statistics(name: str, statistics: RequestStatistics) -> pb.ModelStatistics:
    last = statistics.last_completed_at_s
    return pb.ModelStatistics(
        name=name,
        version=MODEL_VERSION,
        last_inference=0 if last is None else round(last * 1000),
        inference_count=statistics.completed.count,
        inference_stats=pb.InferStatistics(
            success=_duration(statistics.completed),
            fail=_duration(statistics.failed),
            queue=_duration(statistics.queued),
            compute_infer=_duration(statistics.computed),
        ),
    )


def _duration(durations: Durations) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=durations.count, ns=round(durations.seconds * 1e9))


def _tensors(datatypes: dict[str, str]) -> list[pb.ModelMetadataResponse.TensorMetadata]:
    return [
        pb.ModelMetadataResponse.TensorMetadata(name=name, datatype=datatype, shape=[-1])
        for name, datatype in datatypes.items()
    ]
