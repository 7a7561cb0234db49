{{/* What does the cluster know? Fields and API versions that came after the oldest Kubernetes of Chart.yaml are left out
where it would refuse them. */}}

{{- define "refill.kubernetes" -}}
{{ .Capabilities.KubeVersion.Version }}
{{- end }}

{{/* (root, version such as 1.27): "true", or nothing. Providers' endings, v1.27.3-gke.100, are no earlier versions. */}}
{{- define "refill.since" -}}
{{- if semverCompare (printf ">=%s-0" (index . 1)) (include "refill.kubernetes" (index . 0)) -}}
true
{{- end -}}
{{- end }}

{{/* A pod that hangs can't hear that it is to end, so its restart need not wait for that. */}}
{{- define "refill.livenessProbe" -}}
{{- $later := include "refill.since" (list . "1.25") -}}
{{- toYaml (ternary .Values.livenessProbe (omit .Values.livenessProbe "terminationGracePeriodSeconds") (eq $later "true")) -}}
{{- end }}

{{/* A preference: where a cluster does not know the word yet, it is left out, asked for or not. */}}
{{- define "refill.trafficDistribution" -}}
{{- $wanted := .Values.service.trafficDistribution -}}
{{- if and (include "refill.since" (list . "1.34")) (ne $wanted "none") -}}
{{ ternary "PreferSameNode" $wanted (eq $wanted "auto") }}
{{- else if and (include "refill.since" (list . "1.31")) (has $wanted (list "auto" "PreferClose")) -}}
PreferClose
{{- end -}}
{{- end }}
