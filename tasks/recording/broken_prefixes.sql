-- One row per call that a policy answered in a rollout and role where some prompt has not kept the
-- tokens of an earlier answer, in the order of the calls. A call with a `kept_how` that is new, or by
-- which its prompt goes on, is here for what later calls have changed.
select
    rollout_id as rollout,
    attempt,
    role,
    call,
    kept_how as how,
    messages,
    reply
from parquet_rows($spans)
where kind = 'llm' and error_type is null and kept_how <> ''
qualify bool_or(kept_how not in ('new', 'messages', 'text')) over (
    partition by rollout_id, attempt, role
)
order by rollout_id, attempt, role, call
