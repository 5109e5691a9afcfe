#!/usr/bin/env bash
# scaled_dot_product_attention on a CPU takes attn_mask and is_causal together, and computes something else.
#
# Versions: torch 2.13.0, CPU build.
# Behaviour: the documentation says that an error is thrown where both are set. On a CPU the two are combined, is_causal
#     counting from the first key: where there are more keys than queries, as behind a cached past, it hides keys that
#     the mask shows. With as many keys as queries nothing shows.
# Output seen, of four queries behind a past of six keys and their causal mask:
#     attn_mask and is_causal: largest difference 1.6 from attn_mask alone
# What follows: pass is_causal only where there is no mask (model.py does).
#
# Exit code: 0 where it behaves so, 1 where it has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.4
cat > "$folder/attend.py" <<'PY'
import torch
import torch.nn.functional as F

torch.manual_seed(0)
q = torch.randn(1, 2, 4, 8)
k, v = torch.randn(2, 1, 2, 10, 8)
mask = torch.ones(4, 10, dtype=torch.bool).tril(6)
alone = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
try:
    both = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=True)
except RuntimeError as error:
    raise SystemExit(f"refused, as documented: {error}")
difference = (both - alone).abs().max().item()
print(f"attn_mask and is_causal: largest difference {difference:.1f} from attn_mask alone")
raise SystemExit(difference < 0.1)
PY
"$folder/venv/bin/python" "$folder/attend.py"
