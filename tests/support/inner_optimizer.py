"""An inner optimizer outside the package: averaged gradients with bias correction, and a pull to zero."""

from fmmeta.meta.inner_optimizers import InnerOptimizer


def direction(g, phi, state, step):
    mean = state["mean"].mul_(0.5).add_(g, alpha=0.5)
    return mean / (1 - 0.5**step) + 0.01 * phi


def whole_norm(g, phi, state, step):
    return g / g.norm()


def replaced(g, phi, state, step):
    state["mean"] = 0.5 * state["mean"] + g
    return state["mean"]


def heavy_ball(g, phi, state, step):
    return state["mean"].mul_(0.5).add_(g)


def differentiable_heavy_ball(g, phi, state, step):
    u = 0.5 * state["mean"] + g
    return u, {"mean": u}


def averaged(g, phi, state, step):
    return state["mean"].lerp_(g, 0.5)  # raises if the dtypes differ


def differentiable_averaged(g, phi, state, step):
    u = state["mean"].lerp(g, 0.5)
    return u, {"mean": u}


spec = InnerOptimizer(("mean",), direction)
same_dtype = InnerOptimizer(("mean",), averaged)
same_dtype_smooth = InnerOptimizer(("mean",), averaged, differentiable=differentiable_averaged)
normed = InnerOptimizer((), whole_norm)
not_in_place = InnerOptimizer(("mean",), replaced)
nameless = InnerOptimizer((), direction)
smooth = InnerOptimizer(("mean",), heavy_ball, differentiable=differentiable_heavy_ball)
unlike = InnerOptimizer(("mean",), direction, differentiable=differentiable_heavy_ball)
with_momentum = InnerOptimizer((), lambda g, phi, state, step: g, momentum=0.9)
