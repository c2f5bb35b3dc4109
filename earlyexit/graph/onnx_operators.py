"""What kind of operator each operator of ONNX is."""

from __future__ import annotations

from earlyexit.graph.dataflow import OperatorKind

BRANCHING = frozenset({"If", "Loop", "Scan", "SequenceMap"})
"""They hold graphs of their own, which run or not, and how often, by what the inputs hold."""
SIZES = frozenset({"Shape", "Size", "EyeLike"})
RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli"}
)
_ACTIVATIONS = """Relu LeakyRelu PRelu Elu Selu Celu ThresholdedRelu HardSigmoid HardSwish Sigmoid Tanh Softplus
    Softsign Gelu FastGelu QuickGelu BiasGelu Mish Swish Clip Erf Softmax LogSoftmax Hardmax Shrink"""
_ARITHMETIC = """Add Sub Mul Div Pow Sqrt Neg Abs Exp Log Reciprocal Sum Mean Max Min Mod Floor Ceil Round Sign Sin Cos
    Where Equal Greater Less GreaterOrEqual LessOrEqual And Or Not Xor IsNaN IsInf"""
_NORMS = """BatchNormalization LayerNormalization InstanceNormalization GroupNormalization RMSNormalization LRN
    LpNormalization MeanVarianceNormalization SimplifiedLayerNormalization SkipLayerNormalization"""
_SHAPES = """Identity Cast CastLike Dropout Reshape Flatten Transpose Squeeze Unsqueeze Expand Tile Concat Split Slice
    Gather GatherElements GatherND Pad DepthToSpace SpaceToDepth Upsample Resize QuantizeLinear DequantizeLinear
    DynamicQuantizeLinear"""
_POOLING = """MaxPool AveragePool LpPool GlobalAveragePool GlobalMaxPool GlobalLpPool ReduceMean ReduceMax ReduceMin
    ReduceSum ReduceSumSquare ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceProd ArgMax ArgMin TopK CumSum"""
LIGHT = frozenset(" ".join((_ACTIVATIONS, _ARITHMETIC, _NORMS, _SHAPES, _POOLING)).split())


def kind_of(op: str, *, looks_up_weights: bool) -> OperatorKind:
    """`looks_up_weights`: of Gather, whether what it gathers from is a table of weights, an embedding."""
    if op in SIZES:
        return "sizes"
    if op in RANDOM:
        return "random"
    return "light" if op in LIGHT and not looks_up_weights else "work"
