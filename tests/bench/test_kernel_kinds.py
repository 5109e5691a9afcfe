"""bench.kernel_kinds: the kind of each kernel, and the tables of their times."""

import pytest

from bench.kernel_kinds import kernel_kind, table_of_kernels, table_of_kinds

KERNELS = [("nvjet_sm90_tst_256x128", 40.0), ("triton_poi_fused_add", 2.0), ("Memset", 0.5)]


@pytest.mark.parametrize(
    "kernel, kind",
    [
        ("nvjet_sm90_qqtst_192x192_128x4_1x2_h_bz_coopB_TNN", "matmuls"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*, ", "attention"),
        ("triton_red_fused_abs_amax_view_0", "torch.compile's kernels"),
        ("cast_both", "our kernels"),
        ("swiglu", "our kernels"),
        ("norm_grad", "our kernels"),
        ("void at::native::reduce_kernel<128, 4, at::native::ReduceOp<", "other kernels"),
    ],
)
def test_a_kernel_is_known_by_its_name(kernel: str, kind: str):
    assert kernel_kind(kernel) == kind


def test_times_of_a_kind_are_added_and_all_of_them_too():
    table = table_of_kinds({"BF16": [*KERNELS, ("nvjet_other", 2.0)]})
    cells = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in table.split("\n")}
    assert (cells["matmuls"], cells["other kernels"], cells["together"]) == ("42.0", "0.5", "44.5")


def test_each_kernel_is_a_line_in_the_order_of_the_row():
    lines = table_of_kernels(KERNELS).split("\n")[2:]
    assert [line.split("|")[1].strip() for line in lines] == [name for name, _ in KERNELS]
