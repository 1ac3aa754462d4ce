-- One row per role that is trained: its turns (calls with an earlier answer in their messages), those
-- that kept the tokens of that answer as they were sampled, and how many did not, by reason.
select
    role,
    (sum(calls) - count(*) filter (where begins = 'new'))::bigint as turns,
    (sum(calls) - count(*))::bigint as kept,
    coalesce(histogram(begins) filter (where begins <> 'new'), map {}) as not_kept
from parquet_rows($trajectories)
where list_contains(mask, 1)
group by role
order by role
