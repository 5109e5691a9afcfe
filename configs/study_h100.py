"""The measured study: four sizes on one H100, real text, the largest size predicted first.

    python scaling/sweep.py configs/study_h100.py                       what it costs, what is done
    python scaling/sweep.py configs/study_h100.py --run limit=540       stops in time; again: the next part

Sizes are counted without the vocabulary's parameters, which are 56 to 80 % of the total here: budgets of 5, 10 and 20 tokens
per such parameter, because 20 per parameter of all would outrun the text that a machine without a network holds. Laws are
fitted under both counts. The learning rate is swept at the smallest size (configs/study_h100_lr.py), the others follow by
the rule in configs/h100.py.

Recipes. All at the two smallest sizes; from them scaling/precision.py ranks the FP8 recipes by its declared rule, and the
first of the ranking is trained at the two larger sizes as well: FP8_AT_ALL, empty until it is known, for a study may be
added to and nothing in it changed. Seeds: two at the three smallest, the null of other seeds. BF16 runs are also repeated
with the loss computed in four parts, whose gradients add up in another order: same seed, same tokens, other rounding, the
null of the same seed.

Held out. When all else is done, name FP8_AT_ALL and freeze the predictions of the largest size, FP8's among them (scaling/fit.py
out/h100 --predict RUN); then train it by name, only=h100_24m_*.
"""

from scaling.study import Size, Study

FP8_AT_ALL = ()         # the first of the ranking, such as ("tensorwise",)
ALL = ("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "auto")

study = Study(
    name="h100",
    params="nonembed",
    sizes=(
        Size(config="configs/h100_3m_bf16.py", seeds=(1337, 1338), recipes=ALL, null_seeds=(1337, 1338)),
        Size(config="configs/h100_6m_bf16.py", seeds=(1337, 1338), recipes=ALL, null_seeds=(1337,)),
        Size(config="configs/h100_12m_bf16.py", seeds=(1337, 1338), recipes=("bf16", *FP8_AT_ALL), null_seeds=(1337,)),
        Size(config="configs/h100_24m_bf16.py", recipes=("bf16", *FP8_AT_ALL), held_out=True),
    ),
    tokens_per_param=(5, 10, 20),
    null=("model.loss_chunk=16384",),
    margin_percent=0.25,    # equivalence within a quarter of a percent of the loss, as in the large study
)
