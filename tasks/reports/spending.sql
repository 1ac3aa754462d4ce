-- One row per role: what its answered calls took and cost in training, a judge's among them, in
-- every attempt. What an ancestor of the run has asked is not here, and what an attempt was given again from an
-- earlier one was paid for there.
select
    role,
    count(*) as calls,
    sum(prompt_tokens)::bigint as prompt_tokens,
    sum(sampled_tokens)::bigint as sampled_tokens,
    avg(seconds) as seconds,
    quantile_cont(seconds, 0.95) as slow_seconds,
    sum(cost) as cost

from calls
where split in ('train', 'judge') and not recalled and not list_contains($ancestors::varchar[], asked_by)
group by role
order by role
