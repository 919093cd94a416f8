"""The alphabet of random programs: source of operations, transforms, modules, policies and options.

An operation is an expression of `{a}` and `{b}`, 4x4 matrices, that makes a third one.
"""

import re


def several(table: str) -> list[str]:
    """The entries of a table."""
    return [text.strip() for line in table.strip().splitlines() for text in line.split(" | ")]


# Weights are captured: torch's gradient of a vmapped gradient for the weight of a layer norm or batch norm is wrong.
NORMS = several("""
    F.layer_norm({a}, (4,), w1[0], w2[1], 0.1) | F.layer_norm({a}, (4,), w1[0], eps=0.1)
    F.layer_norm({a}, (4, 4), w2)
    F.rms_norm({a}, (4,), {b}[0], 0.1) | F.group_norm({a}[None], 2, {b}[0], {b}[1], 0.1)[0] | F.normalize({a})
    F.instance_norm({a}[None], weight=w1[0], eps=0.1)[0] | F.instance_norm({a}[None], eps=0.1)[0] * {b}[1]
    F.batch_norm({a}, None, None, w1[0], w2[1], training=True, eps=0.1)
    F.batch_norm({a}, {b}[0].detach() * 1, {b}[1].detach().exp(), w1[2], training=True, eps=0.1)
    F.batch_norm({a}, {b}[0].detach(), {b}[1].detach().exp(), {b}[2], {b}[3], eps=0.1)
""")
PRODUCTS = several("""
    {a} @ {b} * 0.3 | ({a} @ {b}).tanh() | F.linear({a}, {b}, {a}[0]).tanh() | torch.addmm({b}[0], {a}, {b}).sin()
    torch.bmm({a}[None], {b}[None])[0].tanh() | torch.baddbmm({a}[None], {a}[None], {b}[None])[0].tanh()
    torch.einsum("ij,kj->ik", {a}, {b}).tanh() | torch.outer({a}[0], {b}[:, 1]).tanh() | {a} * ({b} @ {a}[0]).tanh()
    F.conv1d({a}[None], {b}[:, :, None], {b}[0])[0].tanh() | torch.kron({a}, {b})[:4, :4].tanh()
    F.conv2d({a}[None, None], {b}[None, None, :3, :3], padding=1)[0, 0].tanh()
    F.scaled_dot_product_attention({a}[None], {b}[None], {a}[None])[0] | {a} @ {b}.softmax(-1)
    F.bilinear({a}, {a}.sin(), {b}.expand(4, 4, 4), {b}[0]).tanh()
    torch.gru_cell({a}, {b}.sin(), {b}.repeat(3, 1), {a}.repeat(3, 1), {b}[0].repeat(3), None)
    added(torch.lstm_cell({a}, ({a}.sin(), {b}), {b}.repeat(4, 1), {a}.repeat(4, 1), {b}[0].repeat(4), None))
    torch.linalg.solve({a} @ {a}.mT + 2 * torch.eye(4), {b}) | torch.linalg.cholesky({a} @ {a}.mT + torch.eye(4)) * {b}
    {a} @ torch.linalg.qr({b} @ {b}.mT + torch.eye(4))[0] | torch.cdist({a}, {b} + 3.0) * 0.1
""")
# The others of those that save tensors for their derivatives.
SAVING = several("""
    {a}.sin() | {a}.tanh() | {a}.sigmoid() | ({a} * 0.3).exp() | {a}.softmax(-1) | {a}.log_softmax(0) | {a}.relu()
    {a} * {b} | {a} * {b} | F.gelu({a}) | F.softplus({a}) | F.prelu({a}, {b}[0]) | F.glu(torch.cat([{a}, {b}], 1))
    {a} / ({b}.norm() + 1) | {a} / (2 + {b}.tanh()) | torch.where({a} > 0, {a}, {b}.sin()) | {a}.cumsum(0).tanh()
    {a}.tanh().cumprod(1) | {a}.sort(1).values | {a}.max(1).values[:, None] * {b} | {a}.logsumexp(0) * {b}
    {a}.gather(1, {b}.detach().argsort(1)) | {a}[[2, 0, 0, 3]] | {a}.index_select(1, torch.tensor([2, 0, 1, 1])) * {b}
    torch.cat([{a}, {b}.sin()])[1:5] | torch.stack([{a}.sin(), {b}]).prod(0).tanh() | {a} * {b}.detach().tanh()
    {a} * torch.tensor([1.0, -2.0, 0.5, 1.5]) | {a} * torch.arange(4.0) | {a} * {b}.sum().sin() | {a}.detach() * {b}
    {a}.split(2)[0].exp().tanh().sum(0) * {b} | (lambda u, v: torch.cat([v.sin(), u * v], -1))(*{a}.chunk(2, -1))
    torch.stack([t.sin() for t in {a}.unbind(1)], 1) | F.max_pool1d({a}[None], 3, 1, 1)[0] * {b} | {a}.amax(0) * {b}
    added(torch.var_mean({a}, -1, keepdim=True)) * {b} | {a}.std(0) * {b} | F.avg_pool2d({a}[None, None], 3, 1, 1)[0, 0]
    F.cross_entropy({a}, torch.tensor([0, 3, 1, 1])) * {b} | F.smooth_l1_loss({a}, {b}, reduction="none")
    F.embedding(torch.tensor([0, 2, 1, 1]), {a}) * {b} | {a}.lerp({b}.tanh(), 0.3)
    {b} + F.embedding_bag(torch.tensor([[0, 2], [1, 1]]), {a}).repeat(2, 1)
    torch.fft.fft({a}).abs().log1p() * {b} | torch.view_as_real(torch.complex({a}, {b}) * (1 + 2j)).sum(-1).tanh()
    F.interpolate({a}[None, None], size=(4, 4), mode="bilinear")[0, 0] * {b}
    {a}.index_add(0, torch.tensor([0, 2]), {b}[:2]) | (lambda s, c: s * c)(*SineAndCosine.apply({a}))
    Scaled.apply({a}.tanh(), {b}[0]) | (lambda v, i: torch.cat([v, v.exp()], 1).tanh() * {b})(*{a}.topk(2))
    {a}.scatter_add(0, {b}.detach().argsort(0), {b}) * 0.5
    torch.index_put({a}, (torch.tensor([0, 1]),), {b}[:2].sin())
    torch.cat([{a}, {b}[:0].sin()]) * {a}.mean().sin() | torch.mul(*torch._foreach_add([{a}, {b}], 0.5))
""")
# These can't run under torch.func, or are too inexact for second derivatives.
PLAIN = several("""
    {a} * float({b}.detach().tanh()[0, 0]) | ({a}.sin() if {b}.sum() > 0 else {a}.cos())
    {a}[{b}.detach() > 0].sum() * {a}
    {a} * torch.from_numpy(np.clip({b}.detach().numpy(), -1, 1)) | {a} * torch.tensor({b}.detach().tanh()[0].tolist())
    {a}.float().sin().double() * {b}.to(torch.float32).double() | OldSquare.apply({a} * 0.5, 3.0) * {b}
    torch.sparse.mm({a}.detach().relu().to_sparse(), {b}) | ({a} * 1).to_sparse().to_dense() * {b}
    torch.poisson({b}.detach().abs().clamp(max=3)) * {a}
""")
# Inner derivatives, without functions that the program defines.
INNER = several("""
    {a} - 0.1 * grad(lambda z: z.square().sum())({a}) | {a} - 0.1 * grad(lambda z: (z @ w1).sin().sum())({a})
    differentiated(lambda p, q: (p * q).sin(), {a}, {b}) | jvp(lambda z: (z @ w2).tanh(), ({a},), ({b},))[1]
    differentiated(lambda p, q: jvp(lambda z: (z @ w1).tanh(), (p,), (q,))[1], {a}, {b})
    vmap(lambda z: z.sin() * w1[0])({a})
""")
LINEAR = several("""
    {a} + {b} | {a} - {b} * 0.5 | {a} * 0.5 | {a} * 1 | {a}.clone() | {a}.flip(0) | {a}.roll(1, 0)
    {a}.tril() + {b}.triu() | torch.stack([{a}[0], {b}[1], {a}[2], {b}[0]]) | {a}.sum(0).expand(4, 4) * 0.5
    {a}.mean() + {b} | {a}.t().contiguous() | torch.zeros_like({a}) + {b} | -{a} | {a}.detach() * 2
    torch.cat([{a}[1:], {b}[:1]]) | F.pad({a}, (1, 0))[:, :4]
""")
RANDOM = several("""
    F.dropout({a}, 0.4) | F.dropout({a}, 0.4).sin() * {b} | {a} * torch.rand(4, 4) | {a} + torch.randn_like({b})
    {a} * torch.bernoulli(torch.full((4, 4), 0.5)) | {a} * torch.empty(4, 4).uniform_() | {a}[torch.randperm(4)]
    {a} * torch.rand(4, generator=GENERATOR) | {a} * random.random() | {a} * float(np.random.rand())
    F.rrelu({a}, 0.1, 0.3, training=True) * 1.5 | F.alpha_dropout({a}, 0.3, training=True)
    F.scaled_dot_product_attention({a}[None], {b}[None], {a}[None], dropout_p=0.5)[0]
    (lambda dead, t: t)(torch.randn(4), {a}.sin()) | F.gumbel_softmax({a}, dim=1)
    {a}[:, torch.multinomial(torch.ones(4), 4)]
""")
VIEWS = several("""
    {a}.t() | {a}.view_as({a}) | {a}[:] | {a}.transpose(0, 1) | {a}.unsqueeze(0)[0] | {a}.reshape(16).reshape(4, 4)
    {a}.detach() | {a}.as_strided((4, 4), (4, 1)) | {a}.flatten().unflatten(0, (4, 4)) | {a}.real | {a}.expand(4, 4)
    {a}.squeeze() | {a}.unbind(0)[0].expand(4, 4) * 1 | {a}.swapaxes(0, 1)[:4]
""")
IN_PLACE = several("""
    {a}.mul_(0.5) | {a}.add_({b}) | {a}[0] = {b}[1] | {a}[:, 1] *= 2 | {a}[1].add_({b}[0]) | {a}.t().mul_(0.5)
    {a}.view(-1)[::2].mul_(2) | {a}.copy_({b}) | {a} += {b} | {a}.zero_() | {a}.fill_(0.5)
    {a}.index_add_(0, torch.tensor([0, 2]), {b}[:2]) | {a}.detach().add_(0.5) | {a}.addmm_({b}, {b}, alpha=0.3)
    {a}.scatter_(0, torch.tensor([[0, 2, 1, 1]]), {b}[:1]) | {a}.fill_diagonal_(0.5) | torch._foreach_add_([{a}], 0.5)
    {a}.sin_() | {a}.tanh_() | {a}.sigmoid_() | {a}.relu_() | {a}.clamp_(max=1).exp_() | {a}.lerp_({b}, 0.3)
    {a}.mul_({b}) | {a}.addcmul_({b}, {b}) | F.dropout({a}, 0.4, inplace=True) | {a}.detach_()
    F.relu({a}, inplace=True) | {a}.masked_fill_({b} > 0, 0.1) | {a}.uniform_() | {a}.t_()
    {a}.index_put_((torch.tensor([0, 1]),), {b}[:2], accumulate=True)
""")
# What these make is read by their derivatives, so that it may not change.
READ_BY_ITS_DERIVATIVE = re.compile(r"(tanh|sigmoid|softmax|relu|exp|clamp|dropout|clone)_?\(|Sine|where|norm")

# Calls of {f}, a function of two matrices that makes a third one; the first word is the transform.
CALLS = {
    "call": "{f}({a}, {b})",
    "grad": "grad(lambda p, q: {f}(p, q).sum())({a}, {b})",
    "grad, a step": "{a} - 0.1 * grad(lambda p: {f}(p, {b}).square().sum())({a})",
    "grad, aux": "added(grad(lambda p, q: (lambda r: (r.cos().sum(), r))({f}(p, q)), has_aux=True)({a}, {b}))",
    "grad, value": "(lambda g, v: g * v.tanh())(*grad_and_value(lambda p: {f}(p, {b}).sin().sum())({a}))",
    "vjp": "added(vjp({f}, {a}, {b})[1]({a}.cos()))",
    "vjp, twice": "(lambda r, pull: pull(r)[0] + pull({b})[1])(*vjp({f}, {a}, {b}))",
    "jvp": "added(jvp({f}, ({a}, {b}), ({b}, {a}.cos())))",
    "jvp, one": "jvp(lambda p: {f}(p, {b}), ({a},), ({b},))[1]",
    "hvp": "jvp(grad(lambda p: {f}(p, {b}).sin().sum()), ({a},), ({b},))[1]",
    "linearize": "linearize(lambda p: {f}(p, {b}), {a})[1]({b})",
    "vmap": "vmap({f}, randomness='different')(pair({a}), pair({b})).sum(0)",
    "vmap, last": "vmap(lambda p, q: {f}(p, q) + 0 * q, (None, 2), 1, randomness='same')({a}, pair({b}, 2)).sum(1)",
    "vmap, captured": "vmap(lambda p: {f}(p, {b}), randomness='same')(pair({a})).sum(0)",
    "vmap, chunks": "vmap({f}, (0, 1), chunk_size=1, randomness='same')(pair({a}), pair({b}, 1)).sum(0)",
    "jacrev": "jacrev({f})({a}, {b}).sum((0, 1))",
    "jacrev, chunks": "jacrev({f}, argnums=1, chunk_size=8)({a}, {b}).sum((0, 1))",
    "jacrev, a row": "jacrev(lambda r: {f}({a} * r, {b})[0])({b}[0]) + {a}",
    "jacfwd": "jacfwd({f}, argnums=1)({a}, {b}).sum((0, 1))",
    "jacfwd, a row": "jacfwd(lambda r: {f}({a} * r, {b})[0])({b}[0]) + {a}",
    "hessian": "hessian(lambda r: {f}({a} * r, {b}).sin().sum())({b}[0]) + {a}",
    "autograd": "differentiated({f}, {a}, {b})",
    "autograd, again": "differentiated_again({f}, {a}, {b})",
    "dual": "dual({f}, {a}, {b})",
    "scan": "loop(lambda c, x: ({f}(c, {b}).tanh() + x, c.sum()), {a})",
    "checkpoint": "torch_checkpoint({f}, {a}, {b}, use_reentrant=False)",
    "compat": "compat_checkpoint({f}, {a}, {b})",
}
# How much longer a program takes with a transform; nested ones multiply.
COSTS = {"hessian": 12, "jacrev": 6, "jacfwd": 6, "hvp": 5, "scan": 4, "linearize": 4, "vmap": 1.5, "call": 1}
FUNC = [how for how in CALLS if how.split(",")[0] not in ("call", "autograd", "dual", "scan", "checkpoint", "compat")]

# Modules, and functions of `x` and two modules which make another one.
MODULES = several("""
    nn.Linear(4, 4) | nn.Linear(4, 4) | nn.Linear(4, 4) | nn.LayerNorm(4) | nn.RMSNorm(4) | nn.BatchNorm1d(4)
    nn.Tanh() | nn.Dropout(0.4) | nn.GELU() | nn.Softmax(-1) | Counter() | Average(4) | Rebinding(4) | Stash()
    Stash() | weight_norm(nn.Linear(4, 4)) | spectral_norm(nn.Linear(4, 4)) | orthogonal(nn.Linear(4, 4)) | Noise()
    hooked(nn.Linear(4, 4), {n}) | nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
    Apply(lambda x, m: m(x[None])[0][0], nn.GRU(4, 4, batch_first=True))
    Apply(lambda x, m: m(x[None])[0][0], nn.LSTM(4, 4, batch_first=True))
    Apply(lambda x, m: m(x[None], x[None], x[None])[0][0], nn.MultiheadAttention(4, 2, 0.2, batch_first=True))
    Apply(lambda x, m: m(x[None])[0], nn.TransformerEncoderLayer(4, 2, 8, 0.2, batch_first=True))
    Apply(lambda x, m: m(x).tanh() @ m.weight, nn.Linear(4, 4))
    Apply(lambda x, m: x + m((x.detach()[:, 0].abs() * 3).long().clamp(max=4)), nn.Embedding(5, 4))
    Apply(lambda x, m: Scaled.apply(x.tanh(), m.bias), nn.Linear(4, 4)) | Apply(lambda x, m: vmap(m)(x), Stash())
    Apply(lambda x, m: m({{"x": x, "y": [x.sin(), 2]}})[0], Apply(lambda t, m: (m(t["x"]), t["y"]), nn.Linear(4, 4)))
""")
BODIES = several("""
    x + 0.5 * m(x) | x + 0.5 * m(x) | m(x) * k(x).sigmoid() | checkpoint_name(m(checkpoint_name(x * 1.0, "h")), "a")
    k(m(m(x).tanh())) | torch.no_grad()(m)(x) * x | m(x) if float(x.detach().sum()) > 0 else k(x)
    F.relu(m(x) * 1, inplace=True) | (m(x) * 1).mul_(0.9).add_(x)
""")

POLICIES = several("""
    policies.everything_saveable | policies.save_matmuls | policies.nothing_saveable | policies.save_attention
    policies.save_matmuls_without_batch_dims | ~policies.save_matmuls | policies.save_only_these_names("h", "a*")
    policies.save_anything_except_these_names("h") | policies.save_any_names_but_these("h") | policies.save_convolutions
    policies.save_ops("aten.sin", "aten.mul", "aten.sigmoid_", "aten.index_select") | policies.save_if(chosen({n}))
    policies.save_ops("aten.mul_", "aten.copy_", "aten.add_", "aten.native_dropout", "aten.bernoulli_", "aten.clone")
    policies.save_if(chosen({n})) | ~policies.save_ops("aten.add", "aten.tanh") | policies.save_if(chosen({n}, 5))
    policies.budget(0) | policies.budget(300) | policies.budget(0.3) | policies.budget(0.7, cost="time")
    policies.offload(policies.save_if(chosen({n}))) | policies.offload(policies.save_matmuls)
    policies.save_and_offload_only_these_names(names_which_can_be_saved=["a"], names_which_can_be_offloaded=["h"])
""")
# Policies that save few kinds of operations, or all but few.
FEW = several(
    "policies.save_if(chosen({n}, 9)) | ~policies.save_if(chosen({n}, 9)) | policies.save_if(chosen({n}, 20))"
)
OPTIONS = several("""
    early_stop=False | determinism_check="values" | determinism_check="none" | debug=True | preserve_rng_state=False
""")
DRAWS = re.compile(r"(?i)drop|rand|poisson|bernoulli|uniform|rrelu|gumbel|multinomial|noise|attention|former|spectral")
