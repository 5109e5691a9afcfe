"""What FP8 costs against BF16: the statistics of paired runs, without tables, figures or files.

estimates    means of independent values, their t-intervals, equivalence, power
gaps         the gap of an FP8 run to the BF16 run that shares everything else, over tokens and size
nulls        what two BF16 runs differ by: of other seeds, or of one seed rounded differently
equivalence  whether a gap lies within a margin at every size
ranking      which recipe is the best, by a rule declared beforehand
cost         what a gap costs in compute under a law L(N, D); published laws of the loss
published    published laws of what low precision costs
gap_law      the gap as a power law of size and tokens per parameter, made of gap_cells (means and
             weights), gap_power (the fit), gap_effective (the rival form) and sandwich (uncertainty)
reasons      why a number is not given

Statistics assume independent, roughly normal values: `estimates.clusters` says which are not.
scaling/pairing.py makes pairs of finished runs; scaling/precision.py prints what is found in them.
"""
