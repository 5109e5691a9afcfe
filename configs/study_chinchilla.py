"""The scaling study: four sizes, four budgets, two precisions, repeated seeds, and 1.5B held out to
be predicted.

    python scaling/sweep.py configs/study_chinchilla.py               what it costs, what is done
    python scaling/sweep.py configs/study_chinchilla.py --run gpus=8  all but the held-out size

Sizes and budgets. One tokens-per-parameter ratio is one curve: it cannot tell parameters from data.
By the Cramer-Rao bound (scaling/plan.py), 125M to 350M at 10 and 20 leave the prediction of 1.5B a
standard error of at least 1.46 % of the loss per 0.1 % of noise a run. Four budgets and a size of
50M bring that to 0.46 %, the further seeds to 0.29 %; branches off a trunk make three of the four
budgets nearly free.

Seeds. BF16 runs that differ in the seed alone are the null that a gap of precision is held against.
Ten pairs at each budget give a gap common to all sizes a 95 % interval of 0.7 standard deviations
of a pair; its trend with size stays uncertain.

Arms. BF16 and tensorwise everywhere, by our kernels where each GPU holds the weights. At
125M rowwise_with_gw_hp, torchao's most careful one, and blockwise, DeepSeek-V3's: do finer scales
buy the loss back? The control is nvfp4 at 50M and 5 tokens per parameter: four bits, emulated
(slower than the table of costs says), whose cost of a per cent or more the study must see. Up to
350M each tensorwise trunk decays in BF16 too (switch): does the last fifth recover what FP8 cost?
QK-norm, as in OLMo 2 and Qwen3, bounds the attention logits, whose growth ends most runs in low
precision (2309.14322).

Held out. Freeze the predictions of 1.5B first (scaling/fit.py out/chinchilla --predict
gpt1p5b_bf16_t20_s1337, the same for tensorwise), then run it by name with only=gpt1p5b_*."""

from scaling.study import Size, Study

study = Study(
    name="chinchilla",
    sizes=(
        Size(config="configs/gpt50m_bf16.py", seeds=(1337, 1338, 1339)),
        Size(
            config="configs/gpt50m_bf16.py",
            seeds=(1337, 1338, 1339),
            recipes=("nvfp4",),
            tokens_per_param=(5,),
        ),
        Size(
            config="configs/gpt125m_bf16.py",
            seeds=(1337, 1338, 1339),
            recipes=("bf16", "tensorwise", "rowwise_with_gw_hp", "blockwise"),
        ),
        Size(config="configs/gpt250m_bf16.py", seeds=(1337, 1338)),
        Size(config="configs/gpt350m_bf16.py", seeds=(1337, 1338)),
        Size(config="configs/gpt1p5b_bf16.py", tokens_per_param=(20,), switch=(), held_out=True),
    ),
    tokens_per_param=(5, 10, 20, 40),
    switch=("tensorwise>bf16",),
    overrides=("model.qk_norm=true",),
    # equivalence within a quarter of a percent of the loss; 3 to 6 % of compute at these sizes
    margin_percent=0.25,
)
