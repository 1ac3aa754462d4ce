-- One row per trajectory of a policy in which it sampled something: its tokens, and the advantages
-- of their datum's targets in the table datums, which leave the first token out; null if it was not
-- trained.
select
    rollout_id,
    role,
    trajectories.tokens,
    trajectories.logprobs,
    trajectories.mask,
    datums.advantage,
    datums.advantages
from parquet_rows($trajectories) as trajectories
left join datums using (rollout_id, role, first_call)
where list_contains(trajectories.mask, 1)
order by rollout_id, role, first_call
