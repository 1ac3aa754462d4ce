-- One row per role: the seconds of its answered calls in training, a judge's among them, in every
-- attempt. What an ancestor of the run has asked is not here, nor what an attempt was given again
-- from an earlier one.
select
    role,
    avg(seconds) as seconds,
    quantile_cont(seconds, 0.95) as slow_seconds
from calls
where split in ('train', 'judge') and not recalled and not list_contains($ancestors::varchar[], asked_by)
group by role
order by role
