"""The measured study: four sizes on one H100, real text, the largest size predicted first.

    python scaling/sweep.py configs/study_h100.py                  what it costs, what is done
    python scaling/sweep.py configs/study_h100.py --run limit=540  stops in time; again: goes on

Its data: `prepare_data.py python c tokens=5e8 out=data/h100 val_share=0.02`, and `local FILE...
name=prose out=data/h100`, and arxiv alike. Sizes are counted without the vocabulary's parameters,
which are 56 to 80 % of the total here. The learning rate is swept at the smallest size
(configs/study_h100_lr.py). All recipes run at the two smallest sizes, the first of
scaling/precision.py's ranking at the two larger ones too. Two nulls: other seeds, and the loss
computed in four parts, which changes the order of sums alone. When all else is done, name
FP8_AT_ALL and freeze the predictions of the largest size (scaling/fit.py out/h100 --predict RUN);
then train it by name, only=h100_24m_*."""

from scaling.study import Size, Study

# the first of the ranking, once known, such as ("tensorwise",): a study may be added to
FP8_AT_ALL = ()
ALL = ("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "auto")

study = Study(
    name="h100",
    params="nonembed",
    sizes=(
        Size(
            config="configs/h100_3m_bf16.py",
            seeds=(1337, 1338),
            recipes=ALL,
            null_seeds=(1337, 1338),
        ),
        Size(config="configs/h100_6m_bf16.py", seeds=(1337, 1338), recipes=ALL, null_seeds=(1337,)),
        Size(
            config="configs/h100_12m_bf16.py",
            seeds=(1337, 1338),
            recipes=("bf16", *FP8_AT_ALL),
            null_seeds=(1337,),
        ),
        Size(config="configs/h100_24m_bf16.py", recipes=("bf16", *FP8_AT_ALL), held_out=True),
    ),
    tokens_per_param=(5, 10, 20),
    null=("model.loss_chunk=16384",),
    # equivalence within a quarter of a percent of the loss, as in the large study
    margin_percent=0.25,
)
