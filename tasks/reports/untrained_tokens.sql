-- One row per trajectory of a policy in which it sampled something, as `marked_tokens` has it: of a
-- step without a file of datums, so none was trained.
select
    rollout_id,
    role,
    tokens,
    logprobs,
    mask,
    null::double as advantage,
    null::float[] as advantages

from parquet_rows($trajectories)
where list_contains(mask, 1)
order by rollout_id, role, first_call
