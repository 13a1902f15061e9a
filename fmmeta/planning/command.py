"""`fmmeta plan`: from a config.json and a number of GPUs to the layouts that fit, and the command that runs
the best one.
"""

from fmmeta.common.errors import UsageError
from fmmeta.common.text import to_json
from fmmeta.planning import show
from fmmeta.planning.layouts import Planner
from fmmeta.planning.machines import Profile, find, save, write
from fmmeta.planning.settings import PlanConfig


def run(plan: PlanConfig) -> None:
    """Print the plan. Raises `UsageError` if nothing fits."""
    planner = Planner(plan, profile_of(plan))
    layouts = planner.layouts()
    fits = bool(layouts) and not layouts[0].lacking
    if plan.json:
        print(to_json(show.as_json(planner, layouts), indent=1))
    elif fits:
        print(show.text(planner, layouts))
    if plan.picture is not None and layouts:
        drawn = [one for ways in show.best(layouts).values() for one in ways[: plan.top]]
        title = f"Memory of {plan.model_name_or_path} by layout"
        write(plan.picture, "picture", show.svg(drawn or layouts[: plan.top], plan.gpu_memory_gib, title))
    if not fits:
        raise UsageError(show.lacking(planner, layouts))


def profile_of(plan: PlanConfig) -> Profile:
    if not plan.calibrate:
        return find(plan.machine or "h100")
    from fmmeta.planning.calibrate import measure

    profile = measure(plan)
    if plan.save_profile is not None:
        save(profile, plan.save_profile)
    return profile
