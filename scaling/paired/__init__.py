"""What FP8 costs against BF16: the statistics of paired runs, without tables, figures or files.

estimates    means of independent values, their t-intervals, equivalence, power
gaps         the gap of an FP8 run to the BF16 run that shares everything else, over tokens and size
differences  pairs of two recipes, for the gap of one minus that of the other
nulls        what two BF16 runs differ by: of other seeds, or of one seed rounded differently
equivalence  whether a gap lies within a margin at every size
ranking      which recipe is the best, by a rule declared beforehand
cost         what a gap costs in compute under a law L(N, D); published laws of the loss
published    published laws of what low precision costs
gap_law      the gap as a power law of size and tokens per parameter, of which
             gap_cells has the weights, sandwich the uncertainty, gap_power the fit and
             gap_effective the rival form
reasons      why a number is not given, as a code with its values

Statistics assume independent, roughly normal values: `estimates.clusters` says which are not.
scaling/pairing.py makes pairs of finished runs; scaling/precision.py prints what is found in them.
"""
